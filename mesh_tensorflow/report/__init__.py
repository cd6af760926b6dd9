"""The command `python -m mesh_tensorflow.report`: a report of a transformer, without training."""
