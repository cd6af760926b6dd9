"""Every public name of release 0.1.21 is there and can be called in the same way.

`data/public_api.json` lists, for each module, functions and methods with their parameters,
classes with bases and properties, constants, what packages pass on, and gin registrations.
"""

import ast
import importlib
import importlib.util
import inspect
import json
import pathlib
import re
import sys
import textwrap

import gin
import pytest
import tensorflow.compat.v1 as tf
from helpers import processes
from helpers.oracle.utils_cases import Numbers

import mesh_tensorflow as mtf
from mesh_tensorflow import _gin_names, optimize
from mesh_tensorflow.transformer import (
    transformer,
    transformer_layers,
    universal_transformer,
    utils,
)

API = json.loads((pathlib.Path(__file__).parent / "data" / "public_api.json").read_text())
# What is complete; the rest of the list is for modules to come.
MODULES = [
    "mesh_tensorflow.ops",
    "mesh_tensorflow.ops_with_redefined_builtins",
    "mesh_tensorflow.layers",
    "mesh_tensorflow.optimize",
    "mesh_tensorflow.placement_mesh_impl",
    "mesh_tensorflow.simd_mesh_impl",
    "mesh_tensorflow.tpu_variables",
    "mesh_tensorflow.utils",
    "mesh_tensorflow.test_utils",
    "mesh_tensorflow.auto_mtf",
    "mesh_tensorflow.auto_mtf.api",
    "mesh_tensorflow.auto_mtf.graph_interface",
    "mesh_tensorflow.auto_mtf.layout_optimizer",
    "mesh_tensorflow.auto_mtf.memory_estimator",
    "mesh_tensorflow.auto_mtf.print_cp_model_solution",
    "mesh_tensorflow.auto_mtf.scheduler",
    "mesh_tensorflow.auto_mtf.valid_layouts",
    "mesh_tensorflow.beam_search",
    "mesh_tensorflow.transformer",
    "mesh_tensorflow.transformer.adaptive_softmax",
    "mesh_tensorflow.transformer.attention",
    "mesh_tensorflow.transformer.dataset",
    "mesh_tensorflow.transformer.evolved_transformer",
    "mesh_tensorflow.transformer.fixup_layers",
    "mesh_tensorflow.transformer.funnel_transformer",
    "mesh_tensorflow.transformer.heterogeneous_moe",
    "mesh_tensorflow.transformer.learning_rate_schedules",
    "mesh_tensorflow.transformer.main",
    "mesh_tensorflow.transformer.memory_layers",
    "mesh_tensorflow.transformer.moe",
    "mesh_tensorflow.transformer.t2t_vocabulary",
    "mesh_tensorflow.transformer.transformer",
    "mesh_tensorflow.transformer.transformer_layers",
    "mesh_tensorflow.transformer.universal_transformer",
    "mesh_tensorflow.transformer.utils",
    "mesh_tensorflow.transformer.vocab_embeddings",
    "mesh_tensorflow.transformer.vocabulary",
    "mesh_tensorflow.bert.bert",
    "mesh_tensorflow.bert.optimization",
    "mesh_tensorflow.bert.run_classifier",
    "mesh_tensorflow.bert.run_pretraining",
    "mesh_tensorflow.bert.run_squad",
    "mesh_tensorflow.bert.tokenization",
    "mesh_tensorflow.experimental.data_aug_lib",
    "mesh_tensorflow.experimental.input_reader",
    "mesh_tensorflow.experimental.model_executor",
    "mesh_tensorflow.experimental.offline_data_aug",
    "mesh_tensorflow.experimental.unet",
]
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameters(text):
    """Returns [(name, kind, default as text or None)] of "a, b=None, *args, c=1, **kwargs"."""
    args = ast.parse(f"def f({text}): pass").body[0].args
    defaults = [None] * (len(args.args) - len(args.defaults)) + args.defaults
    found = [(a.arg, "positional", d) for a, d in zip(args.args, defaults)]
    found += [(a.arg, "keyword", d) for a, d in zip(args.kwonlyargs, args.kw_defaults)]
    found += [(a.arg, kind, None) for a, kind in [(args.vararg, "*"), (args.kwarg, "**")] if a]
    return [(name, kind, None if d is None else ast.unparse(d)) for name, kind, d in found]


def same_default(ours, text):
    """Whether a default is the one written; expressions other than literals are not compared."""
    dtype = re.fullmatch(r"tf\.(bfloat16|bool|float\d+|u?int\d+|string)", text)
    if dtype:
        return getattr(ours, "name", None) == dtype.group(1)
    try:
        theirs = ast.literal_eval(text)
    except ValueError:
        return True
    return ours == theirs and isinstance(ours, bool) == isinstance(theirs, bool)


def complaints(text, ours):
    """Returns what a call that the listed parameters allow would trip over."""
    by_name = {p.name: p for p in ours}
    places = [p.name for p in ours if p.kind in POSITIONAL]
    found = []
    listed = parameters(text)
    for place, (name, kind, default) in enumerate(listed):
        if kind in ("*", "**"):
            wanted = {"*": inspect.Parameter.VAR_POSITIONAL, "**": inspect.Parameter.VAR_KEYWORD}
            if not any(p.kind == wanted[kind] for p in ours):
                found.append(f"no {kind}{name}")
            continue
        p = by_name.get(name)
        if p is None:
            found.append(f"no parameter {name}")
        elif kind == "positional" and (p.kind not in POSITIONAL or places.index(name) != place):
            found.append(f"{name} is not positional parameter {place}")
        elif p.kind is inspect.Parameter.POSITIONAL_ONLY:
            found.append(f"{name} cannot be passed by name")
        elif default is not None and (
            p.default is inspect.Parameter.empty or not same_default(p.default, default)
        ):
            found.append(f"{name} defaults to {p.default!r}, not {default}")
    known = {name for name, _, _ in listed}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for p in ours:
        new = p.name not in known and p.kind not in variable
        if new and p.default is inspect.Parameter.empty:
            found.append(f"requires {p.name}")
    return found


def own_parameters(fn, bound):
    """Returns the parameters of a callable, without `self`."""
    found = list(inspect.signature(fn).parameters.values())
    return found[1:] if bound else found


def assigned_attributes(cls):
    """Returns the names that the methods of a class, or of a base of it, assign on self."""
    names = set()
    for c in cls.__mro__:
        if c.__module__.startswith("mesh_tensorflow"):
            tree = ast.parse(textwrap.dedent(inspect.getsource(c)))
            names |= {
                n.attr
                for n in ast.walk(tree)
                if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
            }
            names |= {
                n.target.id
                for n in ast.walk(tree)
                if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            }
    return names


def class_complaints(cls, entry):
    """Yields what a class lacks of its entry."""
    if "init" in entry and cls.__init__ is not object.__init__ and not issubclass(cls, tuple):
        yield from complaints(entry["init"], own_parameters(cls.__init__, True))
    if "namedtuple_fields" in entry and list(cls._fields) != entry["namedtuple_fields"]:
        yield f"fields {cls._fields}"
    for name, text in entry.get("methods", {}).items():
        raw = inspect.getattr_static(cls, name, None)
        fn = getattr(raw, "__func__", raw)
        own = getattr(cls, name, None) is not getattr(object, name, None)
        if not callable(fn) or (name.startswith("__") and not own):
            yield f"no method {name}"
        elif name == "__call__" or not name.startswith("__"):
            bound = not isinstance(raw, staticmethod) and not inspect.isclass(fn)
            yield from (f"{name}: {c}" for c in complaints(text, own_parameters(fn, bound)))
    attributes = [*entry.get("properties", []), *entry.get("instance_attrs", [])]
    for name in attributes:
        if inspect.isfunction(inspect.getattr_static(cls, name, None)):
            yield f"{name} is a method"
        elif not hasattr(cls, name) and name not in assigned_attributes(cls):
            yield f"no attribute {name}"
    for name, text in entry.get("class_attrs", {}).items():
        if getattr(cls, name, None) != ast.literal_eval(text):
            yield f"{name} is not {text}"


def entries(kind):
    """Returns pytest parameters (module, name, entry) for the modules that are complete."""
    return [
        pytest.param(module, name, entry, id=f"{module.removeprefix('mesh_tensorflow.')}.{name}")
        for module in MODULES
        for name, entry in API[module].get(kind, {}).items()
    ]


@pytest.mark.parametrize("module, name, entry", entries("functions"))
def test_function(module, name, entry):
    fn = getattr(importlib.import_module(module), name)
    assert callable(fn)
    assert complaints(entry, own_parameters(fn, False)) == []


@pytest.mark.parametrize("module, name, entry", entries("classes"))
def test_class(module, name, entry):
    cls = getattr(importlib.import_module(module), name.split(".")[0])
    for part in name.split(".")[1:]:
        cls = getattr(cls, part)
    assert inspect.isclass(cls)
    assert list(class_complaints(cls, entry)) == []
    for base in entry.get("bases", []):
        base_module, _, base_name = base.rpartition(".")
        assert issubclass(cls, getattr(importlib.import_module(base_module), base_name)), base


@pytest.mark.parametrize("module, name, entry", entries("constants"))
def test_constant(module, name, entry):
    assert getattr(importlib.import_module(module), name) == ast.literal_eval(entry)


SEPARABLE = (
    "_min_relative_pos _max_relative_pos _output_size _depthwise_filter_initializer_scale "
    "_pointwise_filter_initializer_scale _activation"
)


@pytest.mark.parametrize(
    ("layer", "attributes"),
    [
        (transformer_layers.Conv1DLayer, "_filter_size _output_size _activation"),
        (transformer_layers.SeparableConv1DLayer, SEPARABLE),
        (transformer_layers.Conv1DLocalAttn, SEPARABLE + " _num_unique_depth_filters"),
        (transformer_layers.LightweightConv1DLocalAttn, SEPARABLE + " _num_unique_depth_filters"),
        (transformer_layers.DynamicConv1DLocalAttn, SEPARABLE + " _num_unique_depth_filters"),
        (universal_transformer.UTLayerStack, "_layers _dropout_rate _norm_epsilon"),
    ],
)
def test_attributes_that_subclasses_read(layer, attributes):
    """A layer of a user's own reads how it was made, by the names that the classic gave it."""
    options = {name: object() for name in inspect.signature(layer).parameters}
    made = layer(**options)
    assert {name: getattr(made, name) for name in attributes.split()} == {
        name: options[name[1:]] for name in attributes.split()
    }


@pytest.mark.parametrize("module", MODULES)
def test_names_that_are_passed_on(module):
    ours = importlib.import_module(module)
    assert [n for n in API[module].get("reexports", []) if not hasattr(ours, n)] == []


def test_names_of_the_package():
    """Everything but the modules that are not there yet."""
    missing = {n for n in API["mesh_tensorflow"]["reexports"] if not hasattr(mtf, n)}
    modules = {m.split(".")[1] for m in API if "." in m}
    absent = {m for m in modules if importlib.util.find_spec(f"mesh_tensorflow.{m}") is None}
    assert missing <= absent


def test_names_that_hide_builtins():
    assert mtf.abs is mtf.mtf_abs and mtf.pow is mtf.mtf_pow
    assert mtf.range is mtf.mtf_range and mtf.slice is mtf.mtf_slice
    assert mtf.ops.mtf_abs is mtf.abs and not hasattr(mtf.ops, "abs")


@pytest.mark.parametrize(
    "module, selector", [(m, s) for m in MODULES for s in API[m].get("gin", [])]
)
def test_gin_selector(module, selector):
    importlib.import_module(module)
    assert callable(gin.get_configurable(selector))


def test_added_gin_names():
    """What the classic lacks is listed, as it gives way to a function of a user's by its name."""
    own = ["mesh_tensorflow.auto_mtf.models", "mesh_tensorflow.auto_mtf.gin_models"]
    for module in [*MODULES, *own]:
        importlib.import_module(module)
    registered = {name for name, _ in gin.config._REGISTRY.items() if name.startswith("mesh_t")}
    classic = {selector for m in API for selector in API[m].get("gin", [])}
    assert registered >= _gin_names.ADDED
    assert {
        name
        for name in registered
        if not any(s.endswith(name) or name.endswith(s) for s in classic)
    } == _gin_names.ADDED


def test_what_shares_its_name_with_a_function_of_tensorflow():
    """gin.tf, which transformers import, has `tf.train.MomentumOptimizer` too."""
    gin.parse_config("MomentumOptimizer.momentum = 0.5")
    assert gin.query_parameter("optimize.MomentumOptimizer.momentum") == 0.5
    assert gin.get_configurable("tf.train.MomentumOptimizer") is not gin.get_configurable(
        "MomentumOptimizer"
    )


@pytest.mark.parametrize("name", ["cosine_schedule", "LionOptimizer", "stored_layout"])
def test_a_users_function_by_an_added_name(name):
    def own(peak=1.0):
        return peak

    with gin.unlock_config():
        gin.external_configurable(own, name, module=f"users_{name}")
    gin.parse_config(f"{name}.peak = 3.0")
    assert gin.query_parameter(f"users_{name}.{name}.peak") == 3.0
    assert gin.get_configurable(name)() == 3.0
    [ours] = [selector for selector in _gin_names.ADDED if selector.endswith(f".{name}")]
    assert gin.get_configurable(ours) is not gin.get_configurable(name)


def test_gin_bindings():
    gin.parse_config("mesh_tensorflow.ops.rewrite_stack_variables.max_combined_slice_size = 5")
    gin.parse_config("rewrite_stack_variables.max_combined_variable_size = 7")
    for name, value in [("slice", 5), ("variable", 7)]:
        full = f"rewrite_stack_variables.max_combined_{name}_size"
        assert gin.query_parameter(full) == value


# By module and function: what calls it, from another file or by a table.
CALLERS = {
    ("transformer.transformer", "make_bitransformer"): lambda: utils.build_model(
        "bitransformer", 8, 8
    ),
    ("transformer.utils", "build_model"): lambda: _estimator(),
    ("transformer.utils", "tpu_estimator_model_fn"): lambda: _estimator(),
    ("transformer.utils", "get_variable_dtype"): lambda: _loss(),
    ("transformer.attention", "attention"): lambda: _loss(),
    ("transformer.transformer", "sublayer_mask_padding"): lambda: _loss(),
    ("layers", "softmax_cross_entropy_with_logits"): lambda: _loss(),
    ("ops", "einsum"): lambda: mtf.matmul(*_tensors("a:2", "a:2")),
    ("", "relu"): lambda: _loss(),
}


def _tensors(*shapes):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    return [mtf.ones(mesh, shape) for shape in shapes]


SMALL = """
make_layer_stack.layers = [@transformer_layers.DenseReluDense]
make_layer_stack.num_layers = 1
LayerStack.sublayers_initial = []
LayerStack.sublayers_per_layer = []
LayerStack.sublayers_final = []
Unitransformer.d_model = 8
Unitransformer.max_length = 8
"""


def _estimator():
    gin.parse_config(SMALL)
    names = inspect.signature(utils.get_estimator).parameters
    given = {"vocabulary": Numbers(), "model_type": "lm", "layout_rules": "", "mesh_shape": ""}
    given.update(batch_size=2, sequence_length=4, autostack=True, optimizer=optimize.SgdOptimizer)
    return utils.get_estimator(**dict.fromkeys(list(names)[:19]) | given)


def _loss():
    [ids] = _tensors("batch:2,length:4")
    layers = [transformer_layers.SelfAttention(), transformer_layers.DenseReluDense(8)]
    call, norm = transformer.sublayer_call_layer, transformer.sublayer_rms_norm
    stack = transformer.LayerStack(layers, [], [call, transformer.sublayer_residual], [norm])
    model = transformer.Unitransformer(stack, 8, 8, 8, autoregressive=True, max_length=8)
    ids = mtf.cast(ids, tf.int32)
    return model.call_simple(ids, ids, True, variable_dtype=utils.get_variable_dtype())


@pytest.mark.parametrize("module, name", CALLERS)
def test_a_function_that_a_program_replaces(module, name, monkeypatch):
    """As in the classic, `module.name = mine` is what the package calls."""

    class Called(Exception):
        pass

    def mine(*args, **kwargs):
        raise Called

    public = importlib.import_module(f"mesh_tensorflow.{module}".rstrip("."))
    with tf.Graph().as_default(), pytest.raises(Called):
        monkeypatch.setattr(public, name, mine)
        CALLERS[module, name]()


def test_no_file_keeps_a_function_that_a_program_replaces(monkeypatch):
    files = [m for n, m in sys.modules.items() if n.startswith("mesh_tensorflow.") and "._" in n]
    held = [dict(vars(module)) for module in files]
    for public, name in [(transformer, "Unitransformer"), (utils, "eval_model"), (mtf.ops, "add")]:
        original = getattr(public, name)
        with monkeypatch.context() as patch:
            patch.setattr(public, name, print)
            left = [m.__name__ for m in files if original in vars(m).values()]
            assert not left
            assert getattr(mtf, name, original) is original  # another module's name
        assert getattr(public, name) is original
    assert [dict(vars(module)) for module in files] == held


IMPORTING = """
import gc
import os
import tensorflow as tf
def state():
    from tensorflow.python.framework import tensor_shape
    from tensorflow.python.ops import control_flow_util
    from tensorflow.python.eager import context
    return dict(
        eager=tf.executing_eagerly(),
        control_flow=tf.compat.v1.control_flow_v2_enabled(),
        resources=tf.compat.v1.resource_variables_enabled(),
        shapes=tensor_shape._TENSORSHAPE_V2_OVERRIDE,
        tensor_equality=tf.Tensor._USE_EQUALITY,
        initialized=context.context()._initialized,
        threads=tf.config.threading.get_intra_op_parallelism_threads(),
        verbosity=tf.compat.v1.logging.get_verbosity(),
        operations=len(tf.compat.v1.get_default_graph().get_operations()),
        environment=dict(os.environ),
        collects=gc.isenabled(),
    )
before = state()
import mesh_tensorflow
assert state() == before, (before, state())
assert before["eager"] and before["control_flow"] and before["resources"]
assert not before["initialized"]
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4)
impl = mesh_tensorflow.placement_mesh_impl.PlacementMeshImpl("x:4", "")
assert impl.devices == [f"/device:CPU:{i}" for i in range(4)], impl.devices
print("unchanged")
"""


@pytest.mark.slow
def test_importing_changes_nothing_else():
    """A fresh process: TensorFlow is as it was, and its devices can still be configured."""
    assert processes.python("-c", IMPORTING).stdout.strip() == "unchanged"
