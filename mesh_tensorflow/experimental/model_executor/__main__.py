r"""Alternates between training and evaluation of a U-Net of scans.

python -m mesh_tensorflow.experimental.model_executor --train_file_pattern=... \
        --eval_file_pattern=... --checkpoint_dir=... --mesh_shape="rows:2,columns:2"
"""

from mesh_tensorflow._programs import run_with_flags
from mesh_tensorflow.experimental.model_executor import main

__all__: list[str] = []

if __name__ == "__main__":
    run_with_flags(main, "mesh_tensorflow.experimental.model_executor")
