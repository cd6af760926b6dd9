"""Calls of transformers' functions and layers, data sets, vocabularies and schedules."""

TRANSFORMER = """
schedules.constant @ schedules.constant step:step total_train_steps:steps value=number
schedules.constant_learning_rate @ schedules.constant_learning_rate step:step total_train_steps:steps learning_rate:number
schedules.learning_rate_schedule_noam @ schedules.learning_rate_schedule_noam step:step total_train_steps:steps warmup_steps=steps linear_decay_fraction=number multiplier=number offset=int{0}
schedules.linear_decay @ schedules.linear_decay step:step total_train_steps:steps steps_or_fraction=number
schedules.linear_decay_learning_rate @ schedules.linear_decay_learning_rate step:step total_train_steps:steps initial_lr=number offset=int{0}
schedules.linear_warmup @ schedules.linear_warmup step:step total_train_steps:steps steps_or_fraction=number
schedules.product_learning_rate @ schedules.product_learning_rate step:step total_train_steps:steps factors:tensors{[schedules.constant]} offset=int{0}
schedules.slanted_triangular @ schedules.slanted_triangular step:step total_train_steps:steps cut_fraction=number ratio=int{32} max_learning_rate=number
schedules.truncated_rsqrt @ schedules.truncated_rsqrt step:step total_train_steps:steps warmup_steps=steps
transformer.autoregressive_inputs @ transformer.autoregressive_inputs targets:sequence{ids} sequence_id=sequence{ids}
transformer.delimited_lm_inputs_mask @ transformer.delimited_lm_inputs_mask ids:sequence{ids} eos_id=int
transformer.shift_targets @ transformer.shift_targets targets:sequence{ids} bos_id=int{0} eos_id=int
transformer.reduce_ensemble_logits @ transformer.reduce_ensemble_logits logits:tensor ensemble_dim:dim vocab_dim:dim{b}
transformer.reduce_ensemble_logits_mean_logit @ transformer.reduce_ensemble_logits_mean_logit logits:tensor ensemble_dim:dim vocab_dim:dim{b}
transformer.reduce_ensemble_logits_mean_prob @ transformer.reduce_ensemble_logits_mean_prob logits:tensor ensemble_dim:dim vocab_dim:dim{b}
transformer.reduce_ensemble_logits_select @ transformer.reduce_ensemble_logits_select logits:tensor ensemble_dim:dim vocab_dim:dim{b} *model_id=int
> transformer.reduce_ensemble_logits_select(x, a, b, 5)
> transformer.reduce_ensemble_logits_select(x, a, b, -1)
transformer.sinusoid_positional_embedding_weights @ transformer.sinusoid_positional_embedding_weights mesh:mesh max_length_dim:new_dim model_dim:new_dim{c} dtype:dtype
transformer.get_vocab_embedding_cls @ transformer.get_vocab_embedding_cls -
> transformer.get_vocab_embedding_cls() is transformer.VocabEmbedding
> transformer.get_vocab_embedding_cls(3)
> transformer.get_vocab_embedding_cls(None)
transformer.VocabEmbedding @ transformer.VocabEmbedding -
> transformer.VocabEmbedding(mesh, vocab, d_model, vdtype, 'n', None).ids_to_embedding(ids, context)
> transformer.VocabEmbedding(mesh, vocab, d_model, vdtype, 'n', None).hidden_to_logits(sequence, context)
> transformer.VocabEmbedding(mesh, vocab, d_model, vdtype, 'n', D('e', 2)).hidden_to_logits(sequence, context)
> transformer.VocabEmbedding(mesh, vocab, d_model, vdtype, 'n', None, True).hidden_to_logits(sequence, context)
> transformer.VocabEmbedding(mesh, 6, d_model, vdtype, 'n', None)
> transformer.VocabEmbedding(mesh, vocab, d_model, vdtype, None, None)
transformer.Context @ transformer.Context -
> context.train
> context.activation_dtype
> context.get_position()
> context.nonpadding
> context.encoder_length_dim
> context.get_states(1)
> context.record_new_states([x])
> context.record_constant_state(x)
> context.get_constant_state()
> context.next_layer
> context.length_dim
> context.batch_dims
> transformer.Context(None, mesh, [batch], length, vdtype).mode
> transformer.Context(None, mesh, [batch], length, vdtype).get_position()
> transformer.Context(None, mesh, [batch], length)
> transformer.Context(None, mesh, [batch], length, vdtype, mode='nope').train
transformer.TransformerLayer @ transformer.TransformerLayer -
> transformer.TransformerLayer().call(context, sequence)
> transformer.TransformerLayer().to_json()
> transformer.TransformerLayer().name
> (lambda layer: (layer.set_name('n'), layer.name))(transformer.TransformerLayer())
transformer.LayerStack @ transformer.LayerStack -
> transformer.LayerStack([]).num_layers
> transformer.LayerStack([]).layers
> transformer.LayerStack([], recompute_grads=True).num_layers
> transformer.LayerStack([transformer_layers.DenseReluDense(8)], [], [transformer.sublayer_call_layer], []).call(context, sequence)
> transformer.LayerStack([transformer_layers.DenseReluDense(8)]).call(context, sequence)
> transformer.LayerStack(None)
> transformer.LayerStack(3)
transformer.ReversibleLayerStack @ transformer.ReversibleLayerStack -
> transformer.ReversibleLayerStack([]).num_layers
> transformer.ReversibleLayerStack(None)
transformer.make_layer_stack @ transformer.make_layer_stack -
> transformer.make_layer_stack([transformer_layers.DenseReluDense], num_layers=2).num_layers
> [l.name for l in transformer.make_layer_stack([transformer_layers.DenseReluDense], num_layers=2).layers]
> [l.name for l in transformer.make_layer_stack([transformer_layers.DenseReluDense], num_layers=1, block_scope=False).layers]
> [l.name for l in transformer.make_layer_stack([[transformer_layers.DenseReluDense, 'mine']], num_layers=1).layers]
> transformer.make_layer_stack([], num_layers=2).num_layers
> transformer.make_layer_stack([transformer_layers.DenseReluDense], num_layers=0).num_layers
> transformer.make_layer_stack([3], num_layers=1)
> transformer.make_layer_stack(None, num_layers=1)
> transformer.make_layer_stack([transformer_layers.DenseReluDense], num_layers='2')
transformer.sublayer_call_layer @ transformer.sublayer_call_layer -
> transformer.sublayer_call_layer(sequence, None, context)
transformer.sublayer_rms_norm @ transformer.sublayer_rms_norm x:sequence layer_stack:none context:context epsilon=number name=name
transformer.sublayer_true_layer_norm @ transformer.sublayer_true_layer_norm x:sequence layer_stack:none context:context epsilon=number
transformer.sublayer_scale_norm @ transformer.sublayer_scale_norm x:sequence layer_stack:none context:context epsilon=number name=name
transformer.sublayer_rms_norm_subsampled @ transformer.sublayer_rms_norm_subsampled x:sequence layer_stack:none context:context percentage=number{50.0} epsilon=number
transformer.sublayer_residual @ transformer.sublayer_residual -
> transformer.sublayer_residual(sequence, None, context)
> transformer.sublayer_residual(None, None, None)
transformer.sublayer_dropout @ transformer.sublayer_dropout x:sequence layer_stack:none context:context dropout_rate=number
transformer.sublayer_mask_padding @ transformer.sublayer_mask_padding x:sequence layer_stack:none context:context
transformer.sublayer_rezero @ transformer.sublayer_rezero x:sequence layer_stack:none context:context initial_value=number
transformer.sublayer_clip_activation_gradient @ transformer.sublayer_clip_activation_gradient x:sequence layer_stack:none context:context rms_norm=number
transformer.Unitransformer @ transformer.Unitransformer -
> transformer.Unitransformer(transformer.LayerStack([]), 4, 6, 6, True, 4).fully_autoregressive
> transformer.Unitransformer(transformer.LayerStack([]), 4, 6, 6, False, 4).fully_autoregressive
> transformer.Unitransformer(transformer.LayerStack([]), 4, 6, 6, True, 4).output_vocab_dim
> transformer.Unitransformer(transformer.LayerStack([]), 4, 6, 6, True, 4, vocab_divisor=1).input_vocab_dim
> transformer.Unitransformer(transformer.LayerStack([]), 4, 6, 6, True, 4, ensemble=2).ensemble_dims
> transformer.Unitransformer(transformer.LayerStack([]), 4, 6, 6, True, 4).loss_denominator(ids, 1)
> transformer.Unitransformer(transformer.LayerStack([]), 4, 6, 6, True, 4).call_simple(ids, ids, True)
> transformer.Unitransformer(transformer.LayerStack([]), 4, 6, 6, True, 4, vocab_divisor=1).call_simple(ids, ids, False, mode='eval')
> transformer.Unitransformer(None, 4, 6, 6, True, 4)
> transformer.Unitransformer(transformer.LayerStack([]), '4', 6, 6, True, 4)
> transformer.Unitransformer(transformer.LayerStack([]), 4, 6)
> transformer.Unitransformer(transformer.LayerStack([]), 4, 6, 6, True, 4, unknown=1)
attention_params_simple @ attention.attention_params_simple -
> attention.attention_params_simple(mesh, d_model, D('kv', 2), heads, vdtype).compute_q(sequence)
> attention.attention_params_simple(mesh, d_model, D('kv', 2), heads, vdtype).q_dims
> attention.attention_params_simple(mesh, d_model, D('kv', 2), heads, vdtype).o_dims
> attention.attention_params_simple(mesh, d_model, D('kv', 2), 'heads', vdtype)
attention.AttentionParams @ attention.AttentionParams -
> attention.AttentionParams(mesh, d_model, d_model, d_model, D('k', 2), D('v', 2), [heads], [heads], vdtype).k_dims
> attention.AttentionParams(mesh, d_model, d_model, d_model, D('k', 2), D('v', 2), [heads], [heads], vdtype).v_dims
> attention.AttentionParams(mesh, d_model, d_model, d_model, D('k', 2), D('k', 2), [heads], [heads], vdtype, shared_kv=True).compute_kv(sequence)
> attention.AttentionParams(mesh, d_model, d_model, d_model, D('k', 2), D('v', 2), [heads], [heads], vdtype, shared_kv=True)
> attention.AttentionParams(mesh, d_model, d_model, d_model, D('k', 2), D('v', 2), [heads], [heads], vdtype).compute_kv(sequence)
> attention.AttentionParams(mesh, d_model, d_model, d_model, D('k', 2), D('v', 2), [heads], [heads], vdtype).compute_k(sequence)
> attention.AttentionParams(mesh, d_model, d_model, d_model, D('k', 2), D('v', 2), heads, heads, vdtype)
> attention.AttentionParams(mesh, None, None, None, None, None, None, None, None)
attention.attention @ attention.attention -
> attention.attention(mtf.ones(mesh, 'length:4,k:2'), mtf.ones(mesh, 'memory_length:4,k:2'), mtf.ones(mesh, 'memory_length:4,v:2'), memory_length, D('k', 2), D('v', 2))
> attention.attention(mtf.ones(mesh, 'length:4,k:2'), mtf.ones(mesh, 'memory_length:4,k:2'), mtf.ones(mesh, 'memory_length:4,v:2'), memory_length, D('k', 2), D('v', 2), extra_logit=0.0)
> attention.attention(mtf.ones(mesh, 'length:4,k:2'), mtf.ones(mesh, 'memory_length:4,k:2'), mtf.ones(mesh, 'memory_length:4,v:2'), length, D('k', 2), D('v', 2))
> attention.attention(None, None, None, None, None, None)
attention.visibility_mask_to_attention_bias @ attention.visibility_mask_to_attention_bias visible:bools dtype:dtype
transformer_layers.DenseReluDense @ transformer_layers.DenseReluDense -
> transformer_layers.DenseReluDense(8).call(context, sequence)
> transformer_layers.DenseReluDense(hidden_size=8, activation=['relu', 'linear']).call(context, sequence)
> transformer_layers.DenseReluDense(8, 0.5, 'gelu', True).call(context, sequence)
> transformer_layers.DenseReluDense(8, activation='nope').call(context, sequence)
> transformer_layers.DenseReluDense('8').call(context, sequence)
> transformer_layers.DenseReluDense(8).call(context, None)
> transformer_layers.DenseReluDense(8).call(None, sequence)
> transformer_layers.DenseReluDense(8, unknown=1)
transformer_layers.SelfAttention @ transformer_layers.SelfAttention -
> transformer_layers.SelfAttention(num_heads=2, key_value_size=2).call(context, sequence)
> transformer_layers.SelfAttention(2, 1, 2, True).call(context, sequence)
> transformer_layers.SelfAttention(2, key_value_size=2, relative_attention_type='bias').call(context, sequence)
> transformer_layers.SelfAttention(2, key_value_size=2, relative_attention_type='bias_shared').call(context, sequence)
> transformer_layers.SelfAttention(2, key_value_size=2, relative_attention_type='nope').call(context, sequence)
> transformer_layers.SelfAttention(2, key_value_size=2).kv_dim
> transformer_layers.SelfAttention('2', key_value_size=2).call(context, sequence)
> transformer_layers.SelfAttention(2, key_value_size=2).memory_length(context)
> transformer_layers.SelfAttention(2, key_value_size=2).min_relative_position(context)
> transformer_layers.SelfAttention(2, key_value_size=2).max_relative_position(context)
> transformer_layers.SelfAttention(unknown=1)
transformer_layers.LocalSelfAttention @ transformer_layers.LocalSelfAttention -
> transformer_layers.LocalSelfAttention(radius=2).window_dim
> transformer_layers.LocalSelfAttention(radius=2).min_relative_position(context)
> transformer_layers.LocalSelfAttention(radius=2).max_relative_position(context)
> transformer_layers.LocalSelfAttention('2').window_dim
transformer_layers.Conv1DLayer @ transformer_layers.Conv1DLayer -
> transformer_layers.Conv1DLayer(3, 4).call(context, sequence)
> transformer_layers.Conv1DLayer(filter_size=3, output_size=4, activation='relu').call(context, sequence)
> transformer_layers.Conv1DLayer('3', 4).call(context, sequence)
transformer_layers.SeparableConv1DLayer @ transformer_layers.SeparableConv1DLayer -
> transformer_layers.SeparableConv1DLayer(-1, 1, 4).call(context, sequence)
> transformer_layers.SeparableConv1DLayer(-1, 1, 4).filter_size
> transformer_layers.SeparableConv1DLayer(1, -1, 4).filter_size
> transformer_layers.SeparableConv1DLayer('a', 1, 4)
transformer_layers.attention_params @ transformer_layers.attention_params -
> transformer_layers.attention_params(context, D('kv', 2), 2).q_dims
> transformer_layers.attention_params(context, D('kv', 2), 4, 2).memory_heads_dims
> transformer_layers.attention_params(context, D('kv', 2), 4, 3)
> transformer_layers.attention_params(None, D('kv', 2), 4)
moe.HParams @ moe.HParams -
> moe.HParams(a=1).a
> moe.HParams().add_hparam('a', 3)
> (lambda h: (h.add_hparam('a', 3), h.a))(moe.HParams())
> (lambda h: (h.add_hparam('a', 3), h.a))(moe.HParams(a=1))
> moe.HParams(1)
> moe.HParams().a
moe.MoE1D @ moe.MoE1D -
> moe.MoE1D(num_experts=2, hidden_size=4)
> moe.MoE1D(unknown=1)
> moe.MoE1D(num_experts=2, hidden_size=4).call(None, sequence)
moe.MoE2D @ moe.MoE2D -
> moe.MoE2D(2, 2, hidden_size=4)
> moe.MoE2D(unknown=1)
vocab_embeddings.FactorizedVocabEmbedding @ vocab_embeddings.FactorizedVocabEmbedding -
> vocab_embeddings.FactorizedVocabEmbedding(mesh, vocab, d_model, vdtype, 'n', None, 2).ids_to_embedding(ids, context)
> vocab_embeddings.FactorizedVocabEmbedding(mesh, vocab, d_model, vdtype, 'n', None, 2).hidden_to_logits(sequence, context)
> vocab_embeddings.FactorizedVocabEmbedding(mesh, vocab, d_model, vdtype, 'n', None, '2')
vocab_embeddings.AdaptiveVocabEmbedding @ vocab_embeddings.AdaptiveVocabEmbedding -
> vocab_embeddings.AdaptiveVocabEmbedding(mesh, vocab, d_model, vdtype, 'n', None, [{'token_count': 4, 'embedding_size': 4}, {'token_count': 2, 'embedding_size': 2}]).ids_to_embedding(ids, context)
> vocab_embeddings.AdaptiveVocabEmbedding(mesh, vocab, d_model, vdtype, 'n', None, [{'token_count': 4, 'embedding_size': 4}])
> vocab_embeddings.AdaptiveVocabEmbedding(mesh, vocab, d_model, vdtype, 'n', None, None)
vocab_embeddings.MixtureOfSoftmaxes @ vocab_embeddings.MixtureOfSoftmaxes -
> vocab_embeddings.MixtureOfSoftmaxes(mesh, vocab, d_model, vdtype, 'n', None, 2).hidden_to_logits(sequence, context)
> vocab_embeddings.MixtureOfSoftmaxes(mesh, vocab, d_model, vdtype, 'n', None, '2')
fixup_layers.get_single_scalar_bias @ fixup_layers.get_single_scalar_bias x:sequence name:new_name
fixup_layers.sublayer_fixup_scale @ fixup_layers.sublayer_fixup_scale x:sequence layer_stack:none context:context
fixup_layers.sublayer_fixup_shift @ fixup_layers.sublayer_fixup_shift x:sequence layer_stack:none context:context
evolved_transformer.GatedLinearUnitLayer @ evolved_transformer.GatedLinearUnitLayer -
> evolved_transformer.GatedLinearUnitLayer().call(context, sequence)
> evolved_transformer.GatedLinearUnitLayer(3)
heterogeneous_moe.generate_heterogeneous_expert_masks @ heterogeneous_moe.generate_heterogeneous_expert_masks -
> heterogeneous_moe.generate_heterogeneous_expert_masks(None, 2, D('experts', 2), mesh, D('hidden', 4))
"""

DATA = """
vocabulary.Vocabulary @ vocabulary.Vocabulary -
> vocabulary.Vocabulary()
> words.vocab_size
> words.encode('3 4')
> words.decode([3, 4])
> words.decode_tf(tf.constant([3, 4]))
> words.encode_tf(tf.constant('3 4'))
vocabulary.TFDSVocabulary @ vocabulary.TFDSVocabulary -
> vocabulary.TFDSVocabulary(words).vocab_size
> vocabulary.TFDSVocabulary(words).encode('3 4')
> vocabulary.TFDSVocabulary(None).vocab_size
dataset.pack_dataset @ dataset.pack_dataset -
> dataset.pack_dataset(texts, 8)
> dataset.pack_dataset(texts, {'inputs': 8, 'targets': 8})
> dataset.pack_dataset(texts, 8, keys=['inputs'])
> dataset.pack_dataset(texts, {'inputs': 8})
> dataset.pack_dataset(texts, 8, ['nope'])
> dataset.pack_dataset(texts, '8')
> dataset.pack_dataset(None, 8)
dataset.pack_or_pad @ dataset.pack_or_pad -
> dataset.pack_or_pad(texts, 8)
> dataset.pack_or_pad(texts, 8, pack=False)
> dataset.pack_or_pad(texts, {'inputs': 4, 'targets': 4}, False)
> dataset.pack_or_pad(texts, 4, False, ensure_eos=True)
> dataset.pack_or_pad(texts, 4, False, ['inputs'])
> dataset.pack_or_pad(texts, 4, False, ['nope'])
dataset.trim_and_pad_dataset @ dataset.trim_and_pad_dataset -
> dataset.trim_and_pad_dataset(texts, 2)
> dataset.trim_and_pad_dataset(texts, {'inputs': 2, 'targets': 4})
> dataset.trim_and_pad_dataset(texts, 2, ['inputs'])
> dataset.trim_and_pad_dataset(texts, {'inputs': 2})
> dataset.trim_and_pad_dataset(texts, None)
dataset.ensure_dataset_eos @ dataset.ensure_dataset_eos -
> dataset.ensure_dataset_eos(texts)
> dataset.ensure_dataset_eos(texts, ['inputs'])
> dataset.ensure_dataset_eos(texts, ['nope'])
> dataset.ensure_dataset_eos(None)
dataset.encode_dataset @ dataset.encode_dataset -
> dataset.encode_dataset(tf.data.Dataset.from_tensors({'inputs': '3 4', 'targets': '5'}), words)
> dataset.encode_dataset(tf.data.Dataset.from_tensors({'inputs': '3 4', 'targets': '5'}), (words, words))
> dataset.encode_dataset(tf.data.Dataset.from_tensors({'inputs': '3 4'}), None)
dataset.encode_all_features @ dataset.encode_all_features -
> dataset.encode_all_features(tf.data.Dataset.from_tensors({'inputs': '3 4', 'targets': '5'}), words)
> dataset.encode_all_features(tf.data.Dataset.from_tensors({'inputs': '3 4'}), None)
dataset.supervised_to_dict @ dataset.supervised_to_dict -
> dataset.supervised_to_dict(tf.data.Dataset.from_tensors(('a', 'b')), False)
> dataset.supervised_to_dict(tf.data.Dataset.from_tensors(('a', 'b')), True)
> dataset.supervised_to_dict(tf.data.Dataset.from_tensors({'a': 'b'}), True)
dataset.pad_dataset_with_zeroed_out_examples @ dataset.pad_dataset_with_zeroed_out_examples -
> dataset.pad_dataset_with_zeroed_out_examples(tf.data.Dataset.from_tensors({'inputs': [1, 2]})).take(3)
> dataset.pad_dataset_with_zeroed_out_examples(None)
dataset.EvalDataset @ dataset.EvalDataset -
> dataset.EvalDataset('n', None, None, []).name
> dataset.EvalDataset('n', None)
> dataset.EvalDataset(name='n', dataset_fn=None, postprocess_fn=None, metric_fns=[])[3]
dataset.make_text_line_dataset @ dataset.make_text_line_dataset -
> dataset.make_text_line_dataset(os.path.join(folder, 'none*'))
> dataset.make_text_line_dataset(None)
dataset.simple_text_line_dataset @ dataset.simple_text_line_dataset -
> dataset.simple_text_line_dataset(None)
utils.auto_train_steps @ utils.auto_train_steps -
> utils.auto_train_steps(8, {'inputs': 4, 'targets': 4}, 1000)
> utils.auto_train_steps(8, {'inputs': 4, 'targets': 6}, train_tokens=1000)
> utils.auto_train_steps(8, {'targets': 4})
> utils.auto_train_steps(8, {}, 1000)
> utils.auto_train_steps(0, {'targets': 4}, 1000)
> utils.auto_train_steps('8', {'targets': 4}, 1000)
> utils.auto_train_steps(8, 4, 1000)
utils.clean_decodes @ utils.clean_decodes -
> utils.clean_decodes(tf.constant([[3, 1, 5], [4, 5, 6]]))
> utils.clean_decodes(tf.constant([[3, 2, 5]]), eos_id=2, pad_id=9)
> utils.clean_decodes(tf.constant([[3], [1], [5]]), length_axis=0)
> utils.clean_decodes([[3, 1, 5]])
> utils.clean_decodes(None)
> utils.clean_decodes(tf.constant([1.0, 2.0]))
utils.compute_batch_size @ utils.compute_batch_size -
> utils.compute_batch_size({'inputs': 4, 'targets': 4}, 'rows:2', 'batch:rows', ('tokens_per_batch', 32))
> utils.compute_batch_size({'inputs': 4, 'targets': 4}, 'rows:2', 'batch:rows', ('tokens_per_replica', 32))
> utils.compute_batch_size({'targets': 4}, mtf.convert_to_shape('rows:2'), mtf.convert_to_layout_rules(''), ('sequences_per_batch', 32))
> utils.compute_batch_size({'targets': 4}, 'rows:2', 'batch:rows', ('sequences_per_replica', 3))
> utils.compute_batch_size({'targets': 4}, 'rows:2', 'batch:rows', 32)
> utils.compute_batch_size({'targets': 4}, 'rows:2', 'batch:rows', ('nope', 32))
> utils.compute_batch_size({'targets': 4}, 'rows:2', 'batch:rows', ('tokens_per_batch', 5))
> utils.compute_batch_size({'targets': 4}, 'rows:2', 'batch:rows', None)
> utils.compute_batch_size({'targets': 4}, 'rows:2', 'batch:rows', 'tokens_per_batch')
> utils.compute_batch_size(None, 'rows:2', 'batch:rows', ('tokens_per_batch', 32))
utils.serialize_num_microbatches @ utils.serialize_num_microbatches -
> utils.serialize_num_microbatches(D('batch', 8), {'targets': 4}, 'rows:2', 'batch:rows')
> utils.serialize_num_microbatches(D('batch', 8), {'targets': 4}, 'rows:2', 'batch:rows', 4)
> utils.serialize_num_microbatches(D('batch', 8), {'targets': 4}, 'rows:2', 'batch:rows', 1)
> utils.serialize_num_microbatches(D('batch', 8), {'targets': 4}, 'rows:2', 'batch:rows', 0)
> utils.serialize_num_microbatches(D('batch', 8), 4, 'rows:2', 'batch:rows', 4)
> utils.serialize_num_microbatches(8, {'targets': 4}, 'rows:2', 'batch:rows', 4)
utils.get_step_from_checkpoint_path @ utils.get_step_from_checkpoint_path -
> utils.get_step_from_checkpoint_path('/a/model.ckpt-100')
> utils.get_step_from_checkpoint_path('model.ckpt-0')
> utils.get_step_from_checkpoint_path('/a/model.ckpt')
> utils.get_step_from_checkpoint_path('')
> utils.get_step_from_checkpoint_path(None)
> utils.get_step_from_checkpoint_path('/a/model.ckpt-1-2')
> utils.get_step_from_checkpoint_path('/a/model.ckpt-100.index')
utils.get_variable_dtype @ utils.get_variable_dtype master_dtype=dtype slice_dtype=dtype activation_dtype=dtype
> utils.get_variable_dtype()
> utils.get_variable_dtype('float32')
utils.inputs_vocabulary @ utils.inputs_vocabulary -
> utils.inputs_vocabulary((1, 2))
> utils.inputs_vocabulary(words) is words
> utils.inputs_vocabulary({'inputs': 1, 'targets': 2})
> utils.inputs_vocabulary(None)
> utils.inputs_vocabulary([1, 2])
utils.targets_vocabulary @ utils.targets_vocabulary -
> utils.targets_vocabulary((1, 2))
> utils.targets_vocabulary(words) is words
> utils.targets_vocabulary({'inputs': 1, 'targets': 2})
> utils.targets_vocabulary(None)
> utils.targets_vocabulary((1,))
utils.separate_vocabularies @ utils.separate_vocabularies -
> utils.separate_vocabularies(1, 2)
> utils.separate_vocabularies(inputs=words, targets=None)[1]
> utils.separate_vocabularies(1, 2, 3)
utils.init_checkpoint_variable_mapping @ utils.init_checkpoint_variable_mapping -
> utils.init_checkpoint_variable_mapping('n')
> utils.init_checkpoint_variable_mapping('n', lambda s: s + 'x')
> utils.init_checkpoint_variable_mapping(None)
> utils.init_checkpoint_variable_mapping('n', 'x')
utils.should_load_variable @ utils.should_load_variable -
> utils.should_load_variable('n')
> utils.should_load_variable('n', lambda s: False)
> utils.should_load_variable('n', lambda s: None)
> utils.should_load_variable('n', 'x')
utils.variable_filter_max_size @ utils.variable_filter_max_size -
> utils.variable_filter_max_size(v)
> utils.variable_filter_max_size(v, 6)
> utils.variable_filter_max_size(v, 5)
> utils.variable_filter_max_size(v, '5')
> utils.variable_filter_max_size(None)
utils.write_lines_to_file @ utils.write_lines_to_file -
> (utils.write_lines_to_file(['a', 'b'], os.path.join(folder, 'f')), open(os.path.join(folder, 'f')).read())
> (utils.write_lines_to_file([], os.path.join(folder, 'f')), open(os.path.join(folder, 'f')).read())
> (utils.write_lines_to_file([1, 2.5], os.path.join(folder, 'f')), open(os.path.join(folder, 'f')).read())
> utils.write_lines_to_file(None, os.path.join(folder, 'f'))
> utils.write_lines_to_file(['a'], None)
utils.get_inputs_from_file @ utils.get_inputs_from_file -
> (utils.write_lines_to_file(['a', '# c', 'b'], os.path.join(folder, 'f')), utils.get_inputs_from_file(os.path.join(folder, 'f')))
> (utils.write_lines_to_file(['a', '# c', 'b'], os.path.join(folder, 'f')), utils.get_inputs_from_file(os.path.join(folder, 'f'), True))
> utils.get_inputs_from_file('/nowhere')
> utils.get_inputs_from_file(None)
utils.tpu_mesh_shape @ utils.tpu_mesh_shape -
> utils.tpu_mesh_shape('2x2', 2)
> utils.tpu_mesh_shape('4x4', 1)
> utils.tpu_mesh_shape('4x4', 32)
> utils.tpu_mesh_shape('2x2', 2, 2)
> utils.tpu_mesh_shape('v2-8', 2)
> utils.tpu_mesh_shape(None, 2)
> utils.tpu_mesh_shape('2x2', '2')
utils.metric_sum @ utils.metric_sum -
> utils.metric_sum(tf.constant([1.0, 2.0]))
> utils.metric_sum(tf.constant([1.0, 2.0]), 'named')
> utils.metric_sum(None)
utils.metric_max @ utils.metric_max -
> utils.metric_max(tf.constant([1.0, 2.0]), 'named')
> utils.metric_max('x')
utils.encode_inputs @ utils.encode_inputs -
> utils.encode_inputs(['3 4', '5'], words, 'lm', 2, {'inputs': 4, 'targets': 4})
> utils.encode_inputs(['3 4', '5'], words, 'bitransformer', 2, {'inputs': 4, 'targets': 4})
> utils.encode_inputs([], words, 'lm', 2, {'inputs': 4, 'targets': 4})
> utils.encode_inputs(None, words, 'lm', 2, {'inputs': 4, 'targets': 4})
utils.build_model @ utils.build_model -
> utils.build_model('nope', 6, 6)
> utils.build_model(None, 6, 6)
utils.get_checkpoint_iterator @ utils.get_checkpoint_iterator -
> list(utils.get_checkpoint_iterator([5, 10], folder, find_closest=False))
> list(utils.get_checkpoint_iterator(7, folder, find_closest=False))
> list(utils.get_checkpoint_iterator([5, 10], folder, skip_until=7, find_closest=False))
> list(utils.get_checkpoint_iterator('x', folder))
"""
