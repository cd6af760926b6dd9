"""Which tests are left to `--all`, besides those that are marked slow where they stand.

One of each kind stays in the short run. Patterns are of the names that pytest prints.
"""

SLOW = """
bert/test_bert_flags.py::test_programs_in_one_process*
bert/test_bert_programs.py::test_classifier_goes_on_from_records_and_checkpoint*
estimator/test_install.py::test_gin*
estimator/test_install.py::test_not_at_import*
estimator/test_install.py::test_undone*
estimator/test_install.py::test_what_was_there_before_comes_back*
estimator/test_signals_nan.py::test_a_signal_saves_and_ends[[]2-*
estimator/test_tpu_replicated.py::test_trains_evaluates_and_predicts_as_a_placed_mesh_does*
examples/test_toy_model_tpu.py::test_mistakes*
examples/test_transformer_lm.py::test_mistakes_have_no_traceback*
experimental/test_model_executor.py::test_checkpoints_predictions_and_summaries[[]True*
experimental/test_model_executor.py::test_commands*
experimental/test_model_executor.py::test_slices_of_scans[[]True*
experimental/test_model_executor.py::test_training_goes_on_the_other_way*
mesh/test_simd.py::test_training_equals_placement[[]x:8*
mesh/test_simd.py::test_training_equals_placement[[]x:2,y:2,z:2*True*
oracle/calls/test_calls.py::test_calls_agree[[]elementwise*
oracle/calls/test_calls.py::test_calls_agree[[]layers*
oracle/calls/test_calls.py::test_calls_agree[[]mesh*
oracle/calls/test_calls.py::test_calls_agree[[]operations*
oracle/calls/test_calls.py::test_calls_agree[[]optimize*
oracle/calls/test_calls.py::test_calls_agree[[]structure*
oracle/calls/test_calls.py::test_calls_agree[[]transformer*
ops/test_random.py::test_same_bits_in_another_process*
test_docs.py::test_programs_run[[]docs/tutorial/bert*
test_docs.py::test_programs_run[[]docs/tutorial/images_3d*
test_docs.py::test_programs_run[[]docs/tutorial/language_model*
test_docs.py::test_programs_run[[]docs/tutorial/simd*
test_size_zero.py::test_cases*
test_tf_function.py::test_in_a_fresh_process[[]graph_mode*
test_tf_function.py::test_in_a_fresh_process[[]v1_control_flow*
test_tf_function.py::test_in_a_fresh_process[[]v1_variables*
transformer/test_funnel_transformer.py::test_decoding_equals_the_whole_sequence*
transformer/test_further_gin.py::test_trains_and_decodes*
transformer/test_sizes.py::test_t5*
transformer/test_utils_programs.py::test_summaries_of_layers*
transformer/test_utils_runs.py::test_training[[]*-one-*
transformer/test_utils_runs.py::test_training_on_packed_rows*
transformer/test_utils_training.py::test_a_training_that_goes_on_sees_the_data_that_it_would_have*
transformer/test_utils_training.py::test_distillation_from_a_teacher*
""".split("\n")[1:-1]
