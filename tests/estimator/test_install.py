"""`install`: programs find tf.estimator where it was. In processes of their own."""

import subprocess
import sys
import textwrap


def run(program):
    program = textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_not_at_import():
    run("""
        import tensorflow as tf
        import tensorflow.compat.v1 as tf1
        import mesh_tensorflow
        from mesh_tensorflow import estimator
        assert not hasattr(tf, "estimator") and not hasattr(tf1, "estimator")
    """)


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
