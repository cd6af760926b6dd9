"""Conformance of mesh implementations to the contract of MeshImpl.

    python -m mesh_tensorflow.testing.conformance package.module:make_impl
    python -m mesh_tensorflow.testing.conformance package.module:make_impl --only einsum --layouts 9

`make_impl(mesh_shape, layout)` returns the MeshImpl under test. If all processors run one program,
it has an attribute `replicate(program, processors)` that runs a function on each of them and
returns its results, as `simd`, `compiled` and `pjrt` below do. Every case of the table is lowered
in several layouts of the mesh "x:2,y:2". The suite compares:

- values with NumPy, gradients with finite differences, and each layout with the unsplit program;
- the collectives in `lowering.collectives` with those that the cost model predicts;
- the losses of a training run in each layout, and after moving a checkpoint from one layout to
  another.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Optional, TypeAlias

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow._programs import parser_of
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.cases import CASES, Case
from mesh_tensorflow.testing.programs import TOLERANCE, Program, check_results

__all__ = ["Result", "check", "compiled", "gspmd", "main", "pjrt", "placement", "simd"]

MakeImpl: TypeAlias = Callable[[str, str], mtf.MeshImpl]

_MESH = "x:2,y:2"


class Result(NamedTuple):
    """The result of one check.

    Attributes:
      name: the name of the case, or "training" or "checkpoint".
      error: the error text; None if the check passed.
    """

    name: str
    error: Optional[str]


MOST_LAYOUTS = 4  # of a case, besides the empty one


def placement(mesh_shape: str, layout: str) -> mtf.MeshImpl:
    """Returns a PlacementMeshImpl that stores one slice per processor."""
    n = harness.Placing(mesh_shape, layout).cpus
    return mtf.placement_mesh_impl.PlacementMeshImpl(
        mesh_shape, layout, [""] * len(n), merge="none"
    )


def gspmd(mesh_shape: str, layout: str) -> mtf.MeshImpl:
    """Returns a GspmdMeshImpl, for programs on one device of TensorFlow."""
    return mtf.GspmdMeshImpl(mesh_shape, layout)


def simd(mesh_shape: str, layout: str) -> mtf.MeshImpl:
    """Returns a SimdMeshImpl, for use in the program that `simd.replicate` runs."""
    return mtf.simd_mesh_impl.SimdMeshImpl(mesh_shape, layout)


simd.replicate = lambda program, processors: mtf.simd_mesh_impl.replicate(  # type: ignore[attr-defined]
    program, devices=[f"/cpu:{i}" for i in range(processors)]
)


def compiled(mesh_shape: str, layout: str) -> mtf.MeshImpl:
    """Returns a SimdMeshImpl, for use in the program that XLA compiles for one device."""
    return mtf.simd_mesh_impl.SimdMeshImpl(mesh_shape, layout)


compiled.replicate = lambda program, processors: mtf.simd_mesh_impl.replicate(  # type: ignore[attr-defined]
    program, devices=["/cpu:0"], jit_compile=True
)


def pjrt(mesh_shape: str, layout: str) -> mtf.MeshImpl:
    """Returns a GspmdMeshImpl, for use in the program that `pjrt.replicate` runs by JAX."""
    return mtf.GspmdMeshImpl(mesh_shape, layout)


def _on_devices_of_jax(program: Callable[[], Sequence[Any]], processors: int) -> list[Any]:
    """Returns what a program of a session returns that devices of JAX run."""
    jax_devices: Any = mtf.pjrt  # imported when it is used, since it needs JAX
    jax_devices._devices.make_cpus(max(4, processors))  # programs of other sizes may follow
    return list(jax_devices.in_session(program))


pjrt.replicate = _on_devices_of_jax  # type: ignore[attr-defined]


def check(
    make_impl: MakeImpl, only: str = "", most_layouts: int = MOST_LAYOUTS
) -> Iterator[Result]:
    """Runs the checks and yields the result of each.

    Args:
      make_impl: a function of a mesh shape and a layout that returns a MeshImpl.
      only: run only checks whose names contain this string.
      most_layouts: the maximum number of layouts of a case, besides the empty one.
    """
    for case in CASES:
        if only in case.name:
            yield _result(case.name, lambda case=case: _check_case(make_impl, case, most_layouts))
    for name, run in [("training", _check_training), ("checkpoint", _check_checkpoint)]:
        if only in name:
            yield _result(name, lambda run=run: run(make_impl))


def _result(name: str, run: Callable[[], None]) -> Result:
    try:
        run()
    except Exception:  # any error of an implementation is a result to report
        return Result(name, traceback.format_exc(limit=-4))
    return Result(name, None)


def _lowered(
    make_impl: MakeImpl,
    mesh_shape: str,
    layout: str,
    mesh: mtf.Mesh,
    targets: Sequence[mtf.Tensor],
) -> harness.Lowered:
    """Lowers a program through the implementation under test."""
    placing = harness.Placing(mesh_shape, layout)
    return harness.lower_with(
        mesh.graph,
        mesh,
        targets,
        lambda: make_impl(mesh_shape, layout),
        placing,
        lambda program: _run(make_impl, program, len(placing.cpus)),
    )


def _run(make_impl: MakeImpl, program: Callable[[], Any], processors: int) -> Any:
    """Returns what a program returns, which each processor runs if the implementation says how."""
    replicate = getattr(make_impl, "replicate", None)
    return program() if replicate is None else replicate(program, processors)


def _check_case(make_impl: MakeImpl, case: Case, most_layouts: int) -> None:
    with tf.Graph().as_default():
        program = Program(case, case.dtypes[0])
        layouts = harness.legal_layouts(program.graph, _MESH, case.whole, 64, case.alike)
        # Python's own hash of a string differs from process to process, and so would the layouts.
        chosen = harness.chosen_layouts(layouts, 0, zlib.crc32(case.name.encode()))
        # The first one splits nothing: it is compared with NumPy, and the others with it.
        texts = ["", *(harness.layout_text(rules, _MESH) for rules in chosen[:most_layouts])]
        lowered = [
            _lowered(make_impl, _MESH, text, program.mesh, program.targets) for text in texts
        ]
        with harness.session() as session:
            results = harness.values_of(session, lowered, program.feed)
        check_results(program, case.dtypes[0], results[0])
        tolerance = case.tolerance * TOLERANCE[case.dtypes[0]]
        for low, values in zip(lowered, results):
            for i, (value, expected) in enumerate(zip(values, results[0])):
                what = f"{case.name} in {low.placing.layout!r}, target {i}"
                harness.assert_close(value, expected, tolerance, what)
            assert low.counted == low.predicted, (
                f"{case.name} in {low.placing.layout!r} communicates {dict(low.counted)}, "
                f"but {dict(low.predicted)} are predicted"
            )


def _training(make_impl: MakeImpl, layout: str) -> tuple[list[Any], tf.Operation, tf.Operation]:
    """Returns a step of two layers, trained on random data by SGD, and the copies of masters.

    The step is its loss and its updates; the copies are to slices, and back.
    """
    batch, d_in, hidden = (mtf.Dimension(n, 8) for n in ("batch", "d_in", "hidden"))
    random = np.random.RandomState(0)
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    # Each layout has a tf graph of its own, in which initial weights have to be the same.
    tf.set_random_seed(0)
    x, target = (
        mtf.import_tf_tensor(mesh, random.randn(8, 8).astype(np.float32), [batch, d_in])
        for _ in range(2)
    )
    h = mtf.layers.dense(x, [hidden], reduced_dims=[d_in], activation=mtf.tanh, name="first")
    y = mtf.layers.dense(h, [d_in], reduced_dims=[hidden], name="second")
    loss = mtf.reduce_mean(mtf.square(y - target))
    variables = mesh.graph.trainable_variables
    grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
    updates = mtf.optimize.SgdOptimizer(0.5).apply_grads(grads, variables)
    # Taken from within: what runs it on all processors gives the Lowering to nobody.
    copies: list[tf.Operation] = []

    def program() -> list[Any]:
        lowering = mtf.Lowering(mesh.graph, {mesh: make_impl(_MESH, layout)})
        copies.extend([lowering.copy_masters_to_slices(), lowering.copy_slices_to_masters()])
        step = tf.group(*[lowering.lowered_operation(op) for op in updates])
        return [lowering.export_to_tf_tensor(loss), step]

    return _run(make_impl, program, 4), *copies


_LAYOUTS = ("", "batch:x", "batch:x,hidden:y", "d_in:x,hidden:y")


def _losses(
    make_impl: MakeImpl, layout: str, steps: int, restore: str = "", save: str = ""
) -> list[float]:
    """Runs training steps and returns their losses; restores and saves named checkpoints."""
    with tf.Graph().as_default():
        step, to_slices, to_masters = _training(make_impl, layout)
        saver = tf.train.Saver()
        with harness.session() as session:
            session.run(tf.global_variables_initializer())
            if restore:
                saver.restore(session, restore)
            # Initializers and savers write masters, and steps read slices.
            session.run(to_slices)
            losses = [float(session.run(step)[0]) for _ in range(steps)]
            if save:
                session.run(to_masters)
                saver.save(session, save, write_meta_graph=False)
    return losses


def _check_training(make_impl: MakeImpl) -> None:
    expected = _losses(placement, "", 4)
    # Losses that do not change would be equal in every layout, whatever updates do.
    assert expected[-1] < expected[0]
    for layout in _LAYOUTS:
        losses = _losses(make_impl, layout, 4)
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=f"losses in {layout!r}")


def _check_checkpoint(make_impl: MakeImpl) -> None:
    expected = _losses(placement, "", 4)
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "model.ckpt")
        # Two steps before it, and two after it in each layout, are the four of a run without it.
        _losses(make_impl, _LAYOUTS[2], 2, save=path)
        for layout in _LAYOUTS:
            # A checkpoint holds whole masters, whatever the layout that it was written in.
            losses = _losses(make_impl, layout, 2, restore=path)
            what = f"losses in {layout!r} after a checkpoint of {_LAYOUTS[2]!r}"
            np.testing.assert_allclose(losses, expected[2:], rtol=1e-5, err_msg=what)


def _imported(name: str) -> MakeImpl:
    module, _, attribute = name.partition(":")
    if not attribute:
        raise SystemExit(
            f"{name!r} should be module:function, as mesh_tensorflow.testing.conformance:placement"
        )
    sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), attribute)


def _options(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """Returns what the command line says."""
    parser = parser_of(
        "testing.conformance", "Conformance of mesh implementations to the contract of MeshImpl."
    )
    parser.add_argument("make_impl", help="module:function(mesh_shape, layout) -> MeshImpl")
    parser.add_argument("--only", default="", help="a part of the names of the cases to check")
    parser.add_argument(
        "--layouts",
        type=int,
        default=MOST_LAYOUTS,
        help="the most layouts of a case, besides the empty one",
    )
    options = parser.parse_args(arguments)
    if options.layouts < 0:
        parser.error(f"--layouts is {options.layouts}: it has to be 0 or more")
    return options


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Checks an implementation and prints the failures.

    Args:
      arguments: the command-line arguments; `sys.argv[1:]` if None.

    Returns:
      0 if at least one check ran and none failed, else 1.
    """
    options = _options(arguments)
    passed = failed = 0
    for result in check(_imported(options.make_impl), options.only, options.layouts):
        passed, failed = passed + (result.error is None), failed + (result.error is not None)
        if result.error is not None:
            print(f"FAILED {result.name}\n{result.error}", flush=True)
    print(f"{options.make_impl}: {passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
