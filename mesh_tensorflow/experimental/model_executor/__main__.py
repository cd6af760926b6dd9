r"""Alternates between training and evaluation of a U-Net of scans.

python -m mesh_tensorflow.experimental.model_executor --train_file_pattern=... \
        --eval_file_pattern=... --checkpoint_dir=... --mesh_shape="rows:2,columns:2"
"""

import tensorflow.compat.v1 as tf
from absl import app

from mesh_tensorflow.experimental.model_executor import main

__all__: list[str] = []

if __name__ == "__main__":
    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.INFO)
    tf.get_logger().propagate = False  # the logger of absl would print each line again
    app.run(main)
