"""Names of their own in a part: as a program written by hand, in all it sends and takes."""

import collections
import random

import pytest
import tensorflow.compat.v1 as tf
from auto_mtf.test_step_time import SLOW, all_layouts
from auto_mtf.test_stored_costs import counted, predicted

import mesh_tensorflow as mtf
from mesh_tensorflow._core.layout import stored_layout
from mesh_tensorflow.auto_mtf import models
from mesh_tensorflow.auto_mtf.__main__ import main
from mesh_tensorflow.auto_mtf._space import layout_text
from mesh_tensorflow.auto_mtf.parts import Part, RenamedProgram, candidate_parts, with_unread
from mesh_tensorflow.auto_mtf.step_time import MemoryLimitError, ProgramParts, StepEstimator
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.cases import CASES
from mesh_tensorflow.testing.programs import Program

MESH = "rows:2,cols:2"


def under(x, names):
    """Renames dimensions, all at once."""
    return mtf.reshape(x, [mtf.Dimension(names.get(d.name, d.name), d.size) for d in x.shape])


def dense(x, old, new, name):
    return mtf.layers.dense(x, [new], [old], use_bias=True, name=name)


def three_scopes(names, kind="residual", optimizer="sgd", recompute=False):
    """Builds a program of the scopes first, part and last; in part, dimensions have other names."""
    tf.train.get_or_create_global_step()
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, d, hidden = mtf.convert_to_shape("batch:8,d:16,hidden:32")
    own = {n.name: mtf.Dimension(names.get(n.name, n.name), n.size) for n in (batch, d, hidden)}
    back = {new: old for old, new in names.items()}
    x = mtf.import_tf_tensor(mesh, tf.ones([8, 16]), [batch, d])
    with tf.variable_scope("first"):
        h = mtf.relu(dense(x, d, d, "one"))
        early = mtf.tanh(h)

    def block(y):
        z = dense(mtf.relu(dense(y, own["d"], own["hidden"], "in")), own["hidden"], own["d"], "out")
        if kind == "residual":
            return y + z
        return mtf.sigmoid(z) * z if kind == "chain" else z + mtf.sin(y) * y

    with tf.variable_scope("part"):
        y = under(h, names) if names else h
        y = mtf.recompute_grad(block, [y]) if recompute else block(y)
    with tf.variable_scope("last"):
        y = under(y, back) if names else y
        if kind == "around":
            y = y * early + h
        logits = dense(mtf.relu(dense(y, d, hidden, "in")), hidden, d, "out")
        loss = mtf.reduce_mean(mtf.square(logits - x))
    updates = models._updates(loss, optimizer)
    return models.Program(graph, mesh, [loss], updates)


def estimator_of(program, zero=0):
    stored = (
        stored_layout(mtf.convert_to_shape(MESH), zero=zero, zero_axis="rows") if zero else None
    )
    return StepEstimator(program.graph, MESH, program.outputs, SLOW, stored_layout=stored)


def part_named(estimator, name):
    return next(part for part in candidate_parts(estimator, {}) if part.name == name)


@pytest.mark.slow_but(2)
@pytest.mark.parametrize(
    "dims", [["batch"], ["batch", "d"], ["batch", "d", "hidden"]], ids=lambda dims: "-".join(dims)
)
@pytest.mark.parametrize(
    "optimizer, recompute", [(None, False), ("adafactor", False), ("sgd", True)]
)
@pytest.mark.parametrize("kind", ["residual", "chain", "around"])
def test_as_written_by_hand(kind, optimizer, recompute, dims):
    """Seconds, memory and collectives are those of the program that renames, which a Lowering has."""
    with tf.Graph().as_default():
        plain = three_scopes({}, kind, optimizer, recompute)
        before = plain.graph.to_string
        part = part_named(estimator_of(plain), "part")
        copied = RenamedProgram(ProgramParts(plain.graph, plain.outputs), part, dims)
        assert plain.graph.to_string == before
        assert {*copied.names} == {*dims}
    with tf.Graph().as_default():
        written = three_scopes(copied.names, kind, optimizer, recompute)
        ours, theirs = estimator_of(copied.parts), estimator_of(written)
        layouts = all_layouts(ours)
        for layout in random.Random(1).sample(layouts, min(len(layouts), 12)):
            mine, hers = ours.estimate(layout), theirs.estimate(layout)
            assert predicted(ours, layout) == predicted(theirs, layout), layout
            assert mine.seconds.compute == pytest.approx(hers.seconds.compute), layout
            assert mine.seconds.communication == pytest.approx(hers.seconds.communication), layout
            assert mine.peak_bytes == pytest.approx(hers.peak_bytes, rel=0.05), layout
        if optimizer == "adafactor":
            ours, theirs = estimator_of(copied.parts, 3), estimator_of(written, 3)
            for layout in random.Random(4).sample(layouts, min(len(layouts), 4)):
                assert predicted(ours, layout) == predicted(theirs, layout), layout
            ours = estimator_of(copied.parts)
    for layout in random.Random(2).sample(layouts, min(len(layouts), 3)):
        with tf.Graph().as_default():
            written = three_scopes(copied.names, kind, optimizer, recompute)
            found = counted(written, MESH, layout_text(layout))[0]
            assert found == predicted(ours, layout), layout


@pytest.mark.slow_but(20)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_other_names_cost_the_same(case, tf_graph):
    """Every operation that has other names takes as long, where these are split as the old ones."""
    program = Program(case, case.dtypes[0])
    operations = program.graph.operations
    if any(op.inner_operations for op in operations):
        pytest.skip("dimensions in loops are not renamed")
    names = {n for op in operations for y in op.outputs for n in y.shape.dimension_names}
    known = ProgramParts(program.graph, program.targets)
    copied = RenamedProgram(known, Part("p", frozenset(with_unread(operations))), names)
    assert not copied.crossings
    rules = harness.legal_layouts(program.graph, MESH, case.whole, 64, case.alike)
    for op, new in zip(operations, copied.parts.graph.operations, strict=True):
        assert {copied.names[n] for n in op.unsplittable_dims} == {*new.unsplittable_dims}, op
    ours, theirs = (StepEstimator(p.graph, MESH, p.outputs, SLOW) for p in (known, copied.parts))
    for layout in random.Random(3).sample(rules, min(len(rules), 8)):
        layout = {d: m for d, m in layout.items() if m in ("rows", "cols")}
        mine = ours.estimate(layout)
        hers = theirs.estimate({copied.names[d]: m for d, m in layout.items()})
        assert mine.seconds.total == pytest.approx(hers.seconds.total), layout
        assert mine.peak_bytes == hers.peak_bytes, layout


# -- the search


def weird_trick(names=None, optimizer="sgd", hidden=2048):
    """Builds convolutions of many pixels and few weights, then dense layers of many weights."""
    names = names or {}
    tf.train.get_or_create_global_step()
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, height, width, channels = mtf.convert_to_shape("batch:32,height:30,width:30,channels:3")
    shape = [batch, height, width, channels]
    x = mtf.import_tf_tensor(mesh, tf.ones([d.size for d in shape]), shape)
    with tf.variable_scope("convolutions"):
        x = mtf.relu(mtf.layers.conv2d(x, mtf.Dimension("features", 16), name="conv"))
        x = mtf.reduce_max(x, reduced_dim=height)
        x = mtf.reduce_max(x, reduced_dim=width)
    with tf.variable_scope("dense"):
        x = under(x, names) if names else x
        d = mtf.Dimension(names.get("features", "features"), 16)
        for i in range(2):
            new = mtf.Dimension(f"hidden_{i}", hidden)
            x = mtf.relu(dense(x, d, new, f"layer_{i}"))
            d = new
        loss = mtf.reduce_mean(mtf.square(x))
    return models.Program(graph, mesh, [loss], models._updates(loss, optimizer))


def explained(program, mesh="all:4", **kwargs):
    kwargs = {"hardware": SLOW, "alternatives": 2, "parts": True, **kwargs}
    return mtf.auto_mtf.explain(program.graph, mesh, program.outputs, **kwargs)


def test_two_rules_are_better():
    """Convolutions are split by examples, dense layers by features: Krizhevsky (2014)."""
    with tf.Graph().as_default():
        program = weird_trick()
        found = explained(program)
        one = mtf.auto_mtf.layout(
            program.graph, "all:4", program.outputs, objective="time", hardware=SLOW
        )
        assert dict(one.written) == found.one_rule.layout
        assert str(explained(program)) == str(found)
    assert found.chosen.seconds.total < 0.95 * found.one_rule.seconds.total
    assert found.chosen.layout["batch"] == "all"
    assert [*found.renamed.names] == ["batch"]
    new = found.renamed.names["batch"]
    assert new == "batch_dense" and new not in found.chosen.layout
    lines = str(found).splitlines()
    [line] = [line for line in lines if line.strip().startswith("x = ")]
    assert "mtf.rename_dimension(x, 'batch', 'batch_dense')" in line
    assert "where x is convolutions/" in line and " which enters at dense/" in line
    with tf.Graph().as_default():
        written = weird_trick(found.renamed.names)
        theirs = StepEstimator(written.graph, "all:4", written.outputs, SLOW)
        hers = theirs.estimate(found.chosen.layout)
        assert hers.seconds.total == pytest.approx(found.chosen.seconds.total)
        # Of all layouts of the program that renames, none is faster.
        times = [theirs.estimate(layout).seconds.total for layout in all_layouts(found.estimator)]
        assert len(times) > 5 and min(times) == pytest.approx(found.chosen.seconds.total)
        assert counted(written, "all:4", found.chosen.text)[0] == predicted(
            found.estimator, found.chosen.layout
        )


def test_no_gain(tf_graph):
    """Where one rule is as good, the program and its layout are those without parts."""
    program = weird_trick(hidden=16)
    found = explained(program)
    without = explained(program, parts=False)
    assert found.renamed is None
    assert found.chosen == found.one_rule == without.chosen
    assert "parts   none is faster" in str(found)
    assert "parts" not in without.sections() and without.one_rule is None


def test_memory_limit(tf_graph):
    program = weird_trick()
    fast = explained(program)
    limit = fast.chosen.peak_bytes - 1
    tight = explained(program, memory_limit_bytes=limit)
    assert tight.chosen.peak_bytes <= limit
    assert tight.chosen.seconds.total >= fast.chosen.seconds.total
    with pytest.raises(MemoryLimitError):
        explained(program, memory_limit_bytes=1)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"layout": "batch:all"}, "leave one of the two out"),
        ({"objective": "memory"}, 'parts=True is for objective="time"'),
        ({"profile": True}, "cannot be timed"),
    ],
)
def test_arguments_that_do_not_fit(tf_graph, kwargs, message):
    with pytest.raises(ValueError, match=message):
        explained(weird_trick(), **kwargs)


def test_loops(tf_graph):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.ones(mesh, "batch:8")
    [y] = mtf.while_loop(lambda y: mtf.less(mtf.reduce_sum(y), 100.0), lambda y: [y + y], [x])
    with pytest.raises(ValueError, match=r"dimensions in loops .* Leave parts out"):
        mtf.auto_mtf.explain(graph, "all:4", [y], parts=True)


def test_layers_that_repeat_are_one_part(tf_graph):
    program = models.language_model(batch=4, length=8, vocab=16, d_model=16, optimizer="adam")
    estimator = StepEstimator(program.graph, MESH, program.outputs)
    parts = {part.name: part.operations for part in candidate_parts(estimator, {})}
    assert {"layer", "softmax", "layer, softmax"} <= parts.keys()
    by_name = collections.Counter(
        op.name.split("/")[0] for op in parts["layer"] if op.gradient_of is None
    )
    assert by_name["layer_0"] == by_name["layer_1"] > 0
    # With their updates, whose scope is that of the optimizer, and their slots.
    assert by_name.keys() == {"layer_0", "layer_1", "optimizer"}
    variables = [op for op in parts["layer"] if op in program.graph.all_variables]
    weights = [v for v in program.graph.trainable_variables if v.name.startswith("layer")]
    assert len(variables) == 3 * len(weights)


def test_command(capsys):
    sizes = {"batch": 4, "length": 8, "vocab": 16, "d_model": 16, "layers": 1}
    params = [f"--gin_param=language_model.{k}={v}" for k, v in sizes.items()]
    assert main(["--mesh_shape=all:2", "--parts", "--alternatives=0", *params]) == 0
    assert "\nparts   " in capsys.readouterr().out
