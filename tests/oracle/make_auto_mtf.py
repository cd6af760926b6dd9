"""Writes what the classic release's auto_mtf says of some programs, to fixtures/auto_mtf.json.

Run with the oracle's Python (see README.md):  python -m oracle.make_auto_mtf

The programs are those of random_graphs.py, and models, which the file has with it: operations,
tensors with shapes, and which dimensions may not be split.  A program of this package has other
operations than the same one of the classic (softmax is one, for instance), so that only like
programs can be compared.
"""

import json
import os
import random

import classic_shim  # noqa: F401  (first: makes the classic importable)
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.ERROR)

from helpers.oracle import oracle_runner as runner  # noqa: E402
from helpers.oracle.programs_models import MODELS  # noqa: E402
from helpers.oracle.random_graphs import COUNT, random_program  # noqa: E402

import mesh_tensorflow as mtf  # noqa: E402
from mesh_tensorflow.auto_mtf import api, layout_optimizer, memory_estimator, scheduler  # noqa: E402

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures", "auto_mtf.json")


class Any(mtf.Operation):
    """An operation of given inputs and output shapes."""

    def __init__(self, inputs, shapes, mesh, name, unsplittable):
        super().__init__(inputs, mesh=mesh, name=name)
        self._outputs = [
            mtf.Tensor(self, shape, tf.float32, index=i) for i, shape in enumerate(shapes)
        ]
        self._splittable_dims, self._unsplittable_dims = (
            self._initialize_splittable_and_unsplittable_dims("splittable", unsplittable)
        )


def random_graph(seed):
    """Returns (graph, outputs, meshes) of a random program."""
    operations, final, meshes = random_program(seed)
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    tensors = {}
    for name, inputs, outputs, unsplittable in operations:
        shapes = [mtf.convert_to_shape(shape) for shape, _ in outputs]
        made = Any([tensors[t] for t in inputs], shapes, mesh, name, unsplittable)
        tensors.update({f"{name}:{i}": t for i, t in enumerate(made.outputs)})
    return graph, [tensors[t] for t in final], meshes


def model_graph(name):
    """Returns (graph, outputs) of a model with its gradients or updates."""
    with tf.Graph().as_default():
        case = runner.Case(name, "", "")
        outputs = MODELS[name].fn(case)
        return case.graph, [t for t in outputs.values() if t is not None]


def described(graph):
    """Returns the operations of a graph: [name, inputs, [[shape, dtype]], unsplittable dims]."""
    return [
        [
            op.name,
            [t.name for t in op.inputs],
            [
                [",".join(f"{d.name}:{d.size}" for d in t.shape.dims), t.dtype.name]
                for t in op.outputs
            ],
            sorted(op.unsplittable_dims),
        ]
        for op in graph.operations
    ]


def some_layouts(rng, validator):
    """Returns three layouts, legal or not."""
    dims = sorted(validator.splittable_mtf_dimension_names)
    mesh_dims = sorted(validator.mesh_dimension_name_to_size)
    return [
        ";".join(f"{d}:{rng.choice(mesh_dims)}" for d in rng.sample(dims, min(len(dims), n)))
        for n in (1, 2, 4)
    ]


def answers(graph, outputs, mesh_shape, rng):
    """Returns what the classic says of a program on a mesh."""
    estimator = memory_estimator.MemoryEstimator(graph, mtf.convert_to_shape(mesh_shape), outputs)
    validator = estimator.get_layout_validator()
    optimizer = layout_optimizer.LayoutOptimizer(estimator)
    solution = optimizer.solve()
    layouts = ["", solution, *some_layouts(rng, validator)]
    return {
        "layout": solution,
        "peak": optimizer.evaluate_layout(solution),
        "peaks": {text: optimizer.evaluate_layout(text) for text in layouts},
        "valid": sorted(
            f"{d}:{m}"
            for d in validator.splittable_mtf_dimension_names
            for m in validator.mesh_dimension_name_to_size
            if validator.is_valid_assignment(d, m)
        ),
    }


def record(graph, outputs, meshes, seed):
    """Returns what the classic says of a program."""
    rng = random.Random(seed)
    estimator = memory_estimator.MemoryEstimator(graph, mtf.Shape([]), outputs)
    interface = estimator.get_graph_interface()
    naive = layout_optimizer.LayoutOptimizer(estimator, scheduler_alg="NAIVE")
    return {
        "schedule": list(scheduler.minimize_peak_memory(interface, "LIST")),
        "naive": naive.evaluate_layout(""),
        "meshes": {mesh: answers(graph, outputs, mesh, rng) for mesh in meshes},
    }


def main():
    found = {}
    for seed in range(COUNT):
        graph, outputs, meshes = random_graph(seed)
        found[f"random{seed}"] = record(graph, outputs, meshes, seed)
        print(seed, flush=True)
    for name in ["mnist", "language_model", "mixture_of_experts", "halo_diffusion"]:
        graph, outputs = model_graph(name)
        found[name] = {"operations": described(graph), "outputs": [t.name for t in outputs]}
        found[name].update(record(graph, outputs, ["m:4", "m:2,n:2"], name))
        layout, mesh_shape = api.layout_and_mesh_shape(graph, 4, outputs)
        found[name]["four"] = [sorted(map(list, layout._pairs)), mesh_shape.to_integer_list]
        print(name, found[name]["meshes"], flush=True)
    with open(PATH, "w") as f:
        json.dump(found, f, sort_keys=True, separators=(",", ":"))


if __name__ == "__main__":
    main()
