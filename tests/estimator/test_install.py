"""`install`: programs find tf.estimator where it was. In processes of their own."""

import textwrap

import pytest
from helpers import processes


def run(program):
    program = textwrap.dedent(program)
    done = processes.run("-c", program, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_not_at_import():
    run("""
        import tensorflow as tf
        import tensorflow.compat.v1 as tf1
        import mesh_tensorflow
        from mesh_tensorflow import estimator
        assert not hasattr(tf, "estimator") and not hasattr(tf1, "estimator")
    """)


@pytest.mark.slow
def test_where_it_is_found():
    run("""
        from mesh_tensorflow import estimator
        estimator.install()
        estimator.install()
        import tensorflow as tf
        import tensorflow.compat.v1 as tf1
        import tensorflow.compat.v2 as tf2
        import tensorflow.estimator
        import tensorflow.compat.v1.estimator as by_path
        from tensorflow.compat.v1 import estimator as by_name
        from tensorflow.estimator import ModeKeys
        from tensorflow.estimator.export import PredictOutput
        for found in (tf.estimator, tf1.estimator, tf2.estimator, tf.compat.v1.estimator,
                      tensorflow.estimator, by_path, by_name):
            assert found is estimator
        assert tf1.estimator.tpu.TPUEstimator is estimator.tpu.TPUEstimator
        assert tf.estimator.export.PredictOutput is PredictOutput
        assert tf.estimator.ModeKeys.PREDICT == ModeKeys.PREDICT == "infer"

        from tensorflow.python.tpu import tpu_config, tpu_estimator
        import tensorflow.python.tpu.tpu_config
        assert tpu_config.TPUConfig is estimator.tpu.TPUConfig
        assert tpu_config.RunConfig is estimator.tpu.RunConfig
        assert tpu_config.InputPipelineConfig.PER_HOST_V2 == 3
        assert tpu_estimator.TPUEstimatorSpec is estimator.tpu.TPUEstimatorSpec

        import tensorflow_estimator as package
        from tensorflow_estimator.python.estimator import estimator as module, model_fn
        from tensorflow_estimator.python.estimator.model_fn import EstimatorSpec
        from tensorflow_estimator.python.estimator.tpu.tpu_estimator import TPUEstimator
        assert module is estimator is package.estimator
        assert EstimatorSpec is estimator.EstimatorSpec
        assert TPUEstimator is estimator.tpu.TPUEstimator
    """)


@pytest.mark.slow
def test_what_programs_import(tmp_path):
    """The lines of language models, simulations and T5's trainer, tf having been imported before."""
    run(f"""
        import tensorflow.compat.v1 as tf
        import tensorflow.compat.v2 as tf2
        from mesh_tensorflow import estimator
        estimator.install()
        import tensorflow_estimator
        from tensorflow.python.estimator import estimator as oldest
        from tensorflow.python.estimator import estimator_lib, util
        from tensorflow.python.tpu import tpu_config, tpu_context, tpu_estimator
        from tensorflow_estimator.compat.v1 import estimator as by_version
        from tensorflow_estimator.python.estimator import (
            early_stopping, estimator as est_lib, mode_keys, model_fn as model_fn_lib, run_config)
        from tensorflow_estimator.python.estimator.export import export_lib
        from tensorflow_estimator.python.estimator.hooks import basic_session_run_hooks
        from tensorflow_estimator.python.estimator.tpu import tpu_config as config2
        from tensorflow_estimator.python.estimator.tpu.tpu_context import TPUContext

        assert estimator_lib is est_lib is oldest is by_version is tf.estimator is estimator
        assert tensorflow_estimator.python.estimator.model_fn.ModeKeys is mode_keys.ModeKeys
        assert tf.compat.v1.estimator.tpu is tf2.compat.v1.estimator.tpu is tf.estimator.tpu
        assert tpu_estimator.model_fn_lib.EstimatorSpec is model_fn_lib.EstimatorSpec
        assert tpu_estimator.tpu_config.TPUConfig is config2.TPUConfig
        assert tpu_estimator.estimator_lib is est_lib and tpu_context.TPUContext is TPUContext
        assert early_stopping.make_early_stopping_hook
        assert export_lib.PredictOutput and basic_session_run_hooks.CheckpointSaverHook

        directory = {str(tmp_path)!r}
        assert est_lib._load_global_step_from_checkpoint_dir(directory) == 0
        assert est_lib._load_global_step_from_checkpoint_dir(directory + "/none") == 0
        with tf.Graph().as_default(), tf.Session() as session:
            step = tf.train.get_or_create_global_step()
            session.run(tf.assign(step, 7, name="set"), {{}})
            tf.train.Saver().save(session, directory + "/model.ckpt", global_step=7)
        assert est_lib._load_global_step_from_checkpoint_dir(directory) == 7

        config = tpu_config.RunConfig(
            cluster=None, model_dir=directory, save_checkpoints_steps=None,
            save_checkpoints_secs=None, keep_checkpoint_max=3, log_step_count_steps=10,
            tpu_config=tpu_config.TPUConfig(
                num_shards=4, iterations_per_loop=10, num_cores_per_replica=1,
                per_host_input_for_training=tpu_config.InputPipelineConfig.BROADCAST))
        assert config.tpu_config.per_host_input_for_training == 4
        made = tpu_estimator.TPUEstimator(
            use_tpu=False, model_fn=lambda features, labels, mode, params: None, config=config,
            train_batch_size=8, eval_batch_size=8, predict_batch_size=8, params={{"a": 1}})
        assert made.model_dir == directory
    """)


@pytest.mark.slow
def test_gin():
    out = run("""
        from mesh_tensorflow import estimator
        estimator.install()
        import gin.tf
        import tensorflow.compat.v1 as tf
        assert issubclass(gin.tf.GinConfigSaverHook, tf.train.SessionRunHook)

        @gin.configurable
        def rate(value=1):
            return value

        gin.parse_config("rate.value = 5")
        print(rate())
    """)
    assert out == "5\n"


@pytest.mark.slow
def test_undone():
    run("""
        import sys
        import tensorflow as tf
        import tensorflow.compat.v1 as tf1
        from mesh_tensorflow import estimator
        modules = set(sys.modules)
        for _ in range(2):
            estimator.install()
            assert tf.estimator is estimator
            estimator.uninstall()
            assert not hasattr(tf, "estimator") and not hasattr(tf1, "estimator")
            assert not {m for m in set(sys.modules) - modules if "estimator" in m or "tpu_" in m}
            try:
                from tensorflow.python.tpu import tpu_config
            except ImportError:
                pass
            else:
                raise AssertionError("still there")
        estimator.uninstall()
    """)


@pytest.mark.slow
def test_what_was_there_before_comes_back():
    run("""
        import sys, types
        import tensorflow as tf
        tf.estimator = mine = types.ModuleType("mine")
        sys.modules["tensorflow_estimator"] = mine
        from mesh_tensorflow import estimator
        estimator.install()
        assert tf.estimator is estimator and sys.modules["tensorflow_estimator"] is mine
        estimator.uninstall()
        assert tf.estimator is mine
    """)
