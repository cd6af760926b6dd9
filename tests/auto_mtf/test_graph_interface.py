"""GraphInterface, the scheduler and LayoutValidator."""

import pytest
import tensorflow.compat.v1 as tf
from helpers.auto_mtf.program_graphs import build, two_products

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf.graph_interface import GraphInterface
from mesh_tensorflow.auto_mtf.scheduler import minimize_peak_memory
from mesh_tensorflow.auto_mtf.valid_layouts import LayoutValidator


@pytest.fixture
def products():
    graph, outputs = two_products()
    interface = GraphInterface(graph)
    for t in outputs:
        interface.set_tensor_final(t.name)
    return interface


def test_names_and_shapes(products):
    assert products.get_num_operations() == 4
    assert list(products.get_all_operation_names()) == ["X", "Y", "Z", "W"]
    assert list(products.get_all_tensor_names()) == ["X:0", "Y:0", "Z:0", "W:0"]
    assert list(products.get_operation_input_names("Z")) == ["X:0", "Y:0"]
    assert list(products.get_operation_output_names("Z")) == ["Z:0"]
    assert products.get_tensor_dtype("X:0") == tf.int32
    assert products.get_tensor_shape("X:0").as_list() == [4, 6]
    assert products.get_tensor_mtf_dimension_names("X:0") == ["a", "b"]
    assert products.get_operation_mtf_dimension_names("Z") == {"a", "b", "c"}
    assert products.get_tensor_device("X:0") is None
    assert products.get_operation_device("X") is None
    assert products.is_tensor_on_canonical_device("X:0")
    assert products.is_tensor_final("Z:0") and not products.is_tensor_final("W:0")


@pytest.mark.parametrize(
    "layout, sizes, entries",
    [
        (None, None, 24),
        ({}, None, 24),
        ({"a": "m"}, {"m": 2}, 12),
        ({"c": "m"}, {"m": 2}, 24),
        ({"a": "m", "b": "n"}, {"m": 2, "n": 3}, 4),
        ({"a": "m"}, {"m": 5}, 5),
        ({"a": "m", "b": "n"}, {"m": 32, "n": 7}, 1),
    ],
)
def test_sizes(products, layout, sizes, entries):
    assert products.get_tensor_num_entries("X:0", layout, sizes) == entries
    assert products.get_tensor_size("X:0", layout, sizes) == 4 * entries


def test_unknown_names(products):
    for read in [products.get_tensor_shape, products.set_tensor_final, products.is_tensor_final]:
        with pytest.raises(KeyError, match="no tensor named 'V:0'"):
            read("V:0")
    with pytest.raises(KeyError, match="no operation named 'V'"):
        products.get_operation_input_names("V")
    with pytest.raises(KeyError, match="no mesh dimension with a size named 'n'"):
        products.get_tensor_size("X:0", {"a": "n"}, {"m": 2})
    with pytest.raises(ValueError, match="without mesh_dimension_to_size"):
        products.get_tensor_size("X:0", {"a": "n"})
    with pytest.raises(TypeError, match=r"Graph is not tf.Graph or mtf.Graph: <class 'int'>"):
        GraphInterface(5)


def test_memory_contents(products):
    contents = products.compute_memory_contents_under_schedule
    assert contents([0, 1, 3, 2]) == [
        {"X:0"},
        {"X:0", "Y:0"},
        {"X:0", "Y:0", "W:0"},
        {"X:0", "Y:0", "Z:0"},
    ]
    assert contents(range(4))[-1] == {"X:0", "Y:0", "Z:0", "W:0"}
    assert contents([0]) == [{"X:0"}]


def test_cost_graph(products):
    nodes = products.compute_cost_graph(devices=["/device:CPU:0"]).node
    assert [(n.name, n.id, n.is_final) for n in nodes] == [
        ("X", 0, False),
        ("Y", 1, False),
        ("Z", 2, True),
        ("W", 3, False),
    ]
    assert [i.preceding_node for i in nodes[2].input_info] == [0, 1]
    (output,) = nodes[2].output_info
    assert output.size == 128 and output.dtype == tf.int32.as_datatype_enum
    assert [d.size for d in output.shape.dim] == [4, 8]
    assert output.alias_input_port == -1


def test_tf_graph(tf_graph):
    with tf.device("/device:CPU:0"):
        x = tf.placeholder(tf.float32, [3, 4], name="x")
        tf.placeholder(tf.float32, [None, 4], name="unknown")
    with tf.device("/device:GPU:0"):
        tf.split(x, 2, axis=1, name="halves")
    interface = GraphInterface(tf_graph, canonical_device="/device:CPU:0")
    assert interface.get_tensor_device("halves:1") == "/device:GPU:0"
    assert interface.get_operation_device("x") == "/device:CPU:0"
    assert interface.is_tensor_on_canonical_device("x:0")
    assert not interface.is_tensor_on_canonical_device("halves:0")
    assert interface.get_tensor_size("halves:1") == 24
    assert interface.get_tensor_mtf_dimension_names("x:0") == []
    assert interface.get_operation_mtf_dimension_names("x") == set()
    cost = interface.compute_cost_graph(devices=["/device:GPU:0"])
    sizes = {n.name: [o.size for o in n.output_info] for n in cost.node}
    assert sizes["x"] == [0] and sizes["halves"] == [24, 24]
    shaped = {n.name: {o.HasField("shape") for o in n.output_info} for n in cost.node}
    assert shaped["x"] == {False} and shaped["halves"] == {True}
    contents = interface.compute_memory_contents_under_schedule(range(len(cost.node)))
    assert contents[-1] == {"x:0", "halves/split_dim:0", "halves:0", "halves:1"}
    with pytest.raises(ValueError, match="size of tensor 'unknown:0' is not known"):
        interface.get_tensor_size("unknown:0")


def test_schedules(products):
    assert minimize_peak_memory(products, "NAIVE") == range(4)
    assert minimize_peak_memory(products, "LIST") == [0, 1, 3, 2]
    with pytest.raises(NotImplementedError, match="foo is not a scheduler algorithm"):
        minimize_peak_memory(products, "foo")


def test_list_schedule_frees_memory():
    """A large intermediate value is read before another one is made."""
    operations = [["x", [], [["a:1", "float32"]], []]]
    for i in range(3):
        operations.append([f"large{i}", ["x:0"], [["b:100", "float32"]], []])
    for i in range(3):
        operations.append([f"small{i}", [f"large{i}:0"], [["a:1", "float32"]], []])
    operations.append(["sum", [f"small{i}:0" for i in range(3)], [["a:1", "float32"]], []])
    interface = GraphInterface(build(operations)[0])
    assert minimize_peak_memory(interface, "LIST") == [0, 1, 4, 2, 5, 3, 6, 7]


def test_loops_have_no_schedule(tf_graph):
    """A loop of tf.Graph operations, as tf.while_loop makes it without control flow v2."""
    start = tf.raw_ops.Enter(data=tf.constant(0), frame_name="loop")
    merged = tf.raw_ops.Merge(inputs=[start, start]).output
    again = tf.raw_ops.NextIteration(data=merged + 1)
    merged.op._update_input(1, again)
    for op in tf_graph.get_operations():
        for t in op.outputs:
            t.set_shape([])
    with pytest.raises(ValueError, match="operations wait for each other, in a loop: Merge"):
        minimize_peak_memory(GraphInterface(tf_graph), "LIST")


def test_validator():
    graph, _ = build(
        [
            [
                "P",
                [],
                [["d:6", "float32"], ["d:4,_anonymous_3:4", "float32"], ["e:4,f:8", "float32"]],
                [],
            ],
            ["Q", ["P:2"], [["h:4", "float32"]], ["e"]],
        ]
    )
    validator = LayoutValidator(graph, "m:2,n:4")
    assert validator.splittable_mtf_dimension_names == {"d", "f", "h"}
    assert validator.mesh_dimension_name_to_size == {"m": 2, "n": 4}
    valid = validator.is_valid_assignment
    assert valid("d", "m") and not valid("d", "n")  # of sizes 6 and 4
    assert not LayoutValidator(graph, "m:3").is_valid_assignment("d", "m")  # the larger fits
    assert valid("h", "n")
    assert not valid("e", "m") and not valid("_anonymous_3", "m") and not valid("unknown", "m")
    with pytest.raises(KeyError, match="the mesh has no dimension 'o'"):
        valid("d", "o")


def test_inputs_alone_make_no_candidates():
    """A dimension counts when an operation of the graph makes it."""
    assert LayoutValidator(mtf.Graph(), "m:2").splittable_mtf_dimension_names == set()
