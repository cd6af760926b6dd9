"""What is measured: sizes, initial weights, data, meshes and layouts.

Nothing here imports TensorFlow, so the driver can use it too.
"""

import dataclasses
import zlib

import numpy as np

Shape = tuple[int, ...]

IMAGE_BLOCKS = 4
BLOCK_SIZE = 7
IMAGE_SIZE = IMAGE_BLOCKS * BLOCK_SIZE
FILTER_SIZE = 9
NUM_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Workload:
    """One model with its sizes.

    `kind` is "ff", "transformer", "conv", or for a model of the transformer package "lm"
    (language model) or "encdec" (encoder and decoder, `layers` each).
    """

    name: str
    kind: str
    title: str
    layers: int
    d_model: int
    d_ff: int
    batch: int
    length: int = 1
    heads: int = 4
    learning_rate: float = 0.1
    dropout: float = 0.0
    vocab: int = 0
    optimizer: str = "sgd"

    @property
    def uses_package(self) -> bool:
        """Whether the transformer package makes it; there is no plain TensorFlow form then."""
        return self.kind in ("lm", "encdec")

    @property
    def d_kv(self) -> int:
        """The size of one attention head."""
        return self.d_model // self.heads


def _all_workloads() -> list[Workload]:
    """The list of workloads; those with dropout follow their plain forms."""
    ff = Workload(
        "a",
        "ff",
        "4 feed-forward blocks, d_model 512, d_ff 2048, 1024 tokens",
        layers=4,
        d_model=512,
        d_ff=2048,
        batch=1024,
        learning_rate=0.1,
    )
    small = Workload(
        "b_small",
        "transformer",
        "transformer, d_model 64, 128 tokens, 4 layers",
        layers=4,
        d_model=64,
        d_ff=256,
        batch=8,
        length=16,
        learning_rate=0.05,
    )
    b4 = Workload(
        "b4",
        "transformer",
        "transformer, d_model 256, 512 tokens, 4 layers",
        layers=4,
        d_model=256,
        d_ff=1024,
        batch=8,
        length=64,
        learning_rate=0.05,
    )
    b12 = dataclasses.replace(
        b4, name="b12", layers=12, title="transformer, d_model 256, 512 tokens, 12 layers"
    )
    b_large = dataclasses.replace(
        b12,
        name="b_large",
        d_model=1024,
        d_ff=4096,
        heads=16,
        batch=16,
        length=512,
        title="transformer, d_model 1024, 8192 tokens, 12 layers",
    )
    conv = Workload(
        "c",
        "conv",
        "MNIST, two 9x9 convolutions in blocks, batch 200",
        layers=2,
        d_model=16,
        d_ff=512,
        batch=200,
        learning_rate=0.01,
    )
    t12 = dataclasses.replace(
        b12,
        name="t12",
        kind="lm",
        vocab=1024,
        learning_rate=0.01,
        title="language model of the package, d_model 256, 512 tokens, 12 layers",
    )
    adafactor = dataclasses.replace(
        t12,
        name="t12_adafactor",
        optimizer="adafactor",
        learning_rate=0.001,
        title=t12.title + ", Adafactor",
    )
    t6x6 = dataclasses.replace(
        t12,
        name="t6x6",
        kind="encdec",
        layers=6,
        title="T5 of the package, d_model 256, 512 tokens, 6 + 6 layers",
    )
    plain = [ff, small, b4, b12, b_large, conv, t12, adafactor, t6x6]
    return plain + [
        dataclasses.replace(
            w, name=w.name + "_dropout", dropout=0.1, title=w.title + ", dropout 0.1"
        )
        for w in (small, b4)
    ]


WORKLOADS: dict[str, Workload] = {w.name: w for w in _all_workloads()}

# Mesh name to mesh shape, in the string form that both packages read.
MESHES: dict[str, str] = {
    "1": "all:1",
    "2": "all:2",
    "4": "all:4",
    "8": "all:8",
    "2x2": "rows:2;cols:2",
}


def mesh_size(mesh: str) -> int:
    """The number of processors of a mesh, by its name."""
    return int(np.prod([int(n) for n in mesh.split("x")]))


def train_flops(w: Workload) -> float:
    """Multiply-adds of the products of a training step, times two; halos are not counted."""
    tokens = w.batch * w.length
    if w.kind == "conv":
        pixels = w.batch * IMAGE_SIZE**2
        sums = pixels * FILTER_SIZE**2 * (w.d_model + (w.layers - 1) * w.d_model**2)
        dense = IMAGE_SIZE**2 * w.d_model * w.d_ff + w.d_ff**2 + w.d_ff * NUM_CLASSES
        return 6.0 * (sums + w.batch * dense)
    feed_forward = 2 * w.d_model * w.d_ff
    attention = 4 * w.d_model**2 + 2 * w.length * w.d_model
    blocks = w.layers * (feed_forward + (0 if w.kind == "ff" else attention))
    if w.kind == "encdec":  # as many layers of a decoder, which attend to the encoder, too
        blocks += w.layers * (feed_forward + 2 * attention)
    return 6.0 * tokens * (blocks + w.d_model * w.vocab)


def layout(workload: Workload, mesh: str) -> str:
    """The layout rules: data parallel on one axis, model parallel too on two."""
    if "x" not in mesh:
        return "batch:all"
    if workload.kind == "conv":
        return "row_blocks:rows;col_blocks:cols"
    rules = "batch:rows;d_ff:cols"
    if workload.kind != "ff":
        rules += ";heads:cols"
    return rules + ";vocab:cols" if workload.uses_package else rules


def weight_shapes(w: Workload) -> dict[str, tuple[Shape, int]]:
    """Shape and inverse variance of every weight that starts random.

    The last weights of residual branches are smaller the more branches there are. The
    transformer package has its own shapes, see `make_weight`.
    """
    shapes: dict[str, tuple[Shape, int]] = {}
    if w.uses_package:
        return shapes
    if w.kind == "conv":
        f2 = FILTER_SIZE * FILTER_SIZE
        pixels = (IMAGE_BLOCKS, IMAGE_BLOCKS, BLOCK_SIZE, BLOCK_SIZE)
        shapes["conv0"] = ((FILTER_SIZE, FILTER_SIZE, 1, w.d_model), f2)
        shapes["conv1"] = ((FILTER_SIZE, FILTER_SIZE, w.d_model, w.d_model), f2 * w.d_model)
        shapes["hidden1"] = (pixels + (w.d_model, w.d_ff), IMAGE_SIZE**2 * w.d_model)
        shapes["hidden2"] = ((w.d_ff, w.d_ff), w.d_ff)
        shapes["logits"] = ((w.d_ff, NUM_CLASSES), w.d_ff)
        return shapes
    for i in range(w.layers):
        if w.kind == "transformer":
            for name in ("q", "k", "v"):
                shapes[f"block_{i}/{name}"] = ((w.d_model, w.heads, w.d_kv), w.d_model)
            shapes[f"block_{i}/o"] = ((w.heads, w.d_kv, w.d_model), w.d_model * 2 * w.layers)
        shapes[f"block_{i}/wi"] = ((w.d_model, w.d_ff), w.d_model)
        shapes[f"block_{i}/wo"] = ((w.d_ff, w.d_model), w.d_ff * 2 * w.layers)
    return shapes


def _generator(name: str) -> np.random.Generator:
    """A generator that depends on the name alone, in every process."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def make_weights(w: Workload) -> dict[str, np.ndarray]:
    """The initial weights, the same in every process and system."""
    return {
        name: (_generator(name).standard_normal(shape) / np.sqrt(precision)).astype(np.float32)
        for name, (shape, precision) in weight_shapes(w).items()
    }


def make_weight(name: str, shape: Shape) -> np.ndarray:
    """The initial value of a variable of the transformer package, by its name.

    Branches start small: a sharper model would make much of the last bit of each sum.
    """
    value = _generator(name).standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        return 1 + 0.1 * value  # the scale of a norm
    if name.endswith(("/q", "/o", "/wo/kernel")):
        value *= 0.125  # logits are not divided by the root of d_kv; last weights of branches
    return value if name.endswith("embedding") else value * np.float32(shape[0] ** -0.5)


def make_data(w: Workload) -> dict[str, np.ndarray]:
    """Inputs and fixed targets: "x" and "target"."""
    rng = _generator("data")
    if w.uses_package:
        ids = rng.integers(1, w.vocab, (2, w.batch, w.length), dtype=np.int32)
        return {"x": ids[0], "target": ids[1]}
    if w.kind == "conv":
        shape: Shape = (w.batch, IMAGE_SIZE, IMAGE_SIZE)
        return {
            "x": rng.random(shape, dtype=np.float32),
            "target": rng.integers(0, NUM_CLASSES, (w.batch,), dtype=np.int32),
        }
    shape = (w.batch, w.d_model) if w.kind == "ff" else (w.batch, w.length, w.d_model)
    return {
        "x": rng.standard_normal(shape, dtype=np.float32),
        "target": rng.standard_normal(shape, dtype=np.float32),
    }
