"""Runs a TPU program without a TPU: each replica on a CPU device of XLA, collectives included.

A program built by tpu.replicate is cut out of its graph and lowered to StableHLO by TensorFlow
(`xla-legalize-tf`). Every collective of it lowers by itself but CrossReplicaSum: it becomes
`mhlo.cross-replica-sum`, for which StableHLO has no name. It is written here as the all_reduce
with the same groups that it is for XLA; RandomUniformInt likewise as the rng that it is, and
ReciprocalGrad as products.

What the program captures from the host is evaluated once and input to all replicas. Variables become
inputs and outputs: what each replica reads first, and what it assigns.

JAX only serves as a way to the XLA compiler, in a process of its own: this file is run as a script
there. The entry points used are private to JAX.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile

import numpy as np

REPLICATE = "_tpu_replicate"
PASSES = (
    "tf-functional-control-flow-to-regions,xla-legalize-tf,canonicalize,hlo-legalize-to-stablehlo"
)


def run(programs):
    """Runs programs of one number of replicas.

    Args:
      programs: Programs.

    Returns:
      For each program a list with, for each replica, the list of outputs.
    """
    with tempfile.TemporaryDirectory() as directory:
        for i, program in enumerate(programs):
            with open(os.path.join(directory, f"{i}.mlir"), "w") as f:
                f.write(program.stablehlo)
            np.savez(
                os.path.join(directory, f"{i}.inputs.npz"),
                **{f"{j:03}": _bits(x) for j, x in enumerate(program.inputs)},
            )
        (replicas,) = {program.replicas for program in programs}
        subprocess.run(
            [sys.executable, os.path.abspath(__file__), directory, str(len(programs))],
            check=True,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={replicas}",
            },
        )
        results = []
        for i, program in enumerate(programs):
            with np.load(os.path.join(directory, f"{i}.outputs.npz")) as saved:
                outputs = [saved[key] for key in sorted(saved.files)]
            # Each is [replicas, ...].
            outputs = [_from_bits(x, dtype) for x, dtype in zip(outputs, program.dtypes)]
            results.append([[x[r] for x in outputs] for r in range(replicas)])
        return results


def _bits(x):
    return x.view(np.uint16) if x.dtype.name == "bfloat16" else x


def _from_bits(x, dtype):
    return x.view(dtype) if dtype.name == "bfloat16" else x


class Program:
    """A function as tpu.replicate builds it.

    Attributes:
      graph: the tf.Graph.
      replicas: how many there are.
      assigned: a TPUReplicatedInput operation for each variable that is assigned to. The values
        assigned are the last outputs, in this order.
    """

    def __init__(self, fn, inputs, device_assignment=None, start=None):
        """Builds and lowers a program.

        Args:
          fn: a function of tf.Tensors that returns one, or a list of them.
          inputs: for each replica a list of arrays.
          device_assignment: a DeviceAssignment or None.
          start: a function that returns a list of what a session is to run first.
        """
        import tensorflow.compat.v1 as tf

        self.replicas = len(inputs)
        with tf.Graph().as_default() as graph, _loops_that_lower(tf):
            self.graph = graph
            tf.tpu.replicate(
                fn,
                [[tf.constant(x) for x in own] for own in inputs],
                device_assignment=device_assignment,
            )
            # What the program made on the host, such as replica numbers, is input as well.
            operations = graph.get_operations()
            replicated = [op for op in operations if op.type == "TPUReplicatedInput"]
            variables = [op for op in replicated if op.outputs[0].dtype == tf.resource]
            outputs = [op.inputs[0] for op in operations if op.type == "TPUReplicatedOutput"]
            arguments = [op.outputs[0] for op in replicated] + _captured(operations)
            sources = [_values(tf, x, self.replicas) for x in arguments]
            self._start = start() if start else []
            with self._session(tf) as session:
                self.inputs = [np.stack(own) for own in session.run(sources)]
            cluster = _cluster(tf, graph)
            new = {op: _without_resource(cluster, op) for op in variables}
        self.assigned = [op for op in variables if new[op] is not None]
        outputs = [x.name for x in outputs] + [f"{new[op]}:0" for op in self.assigned]

        def whole(*slices):
            # JAX hands each device a slice of an array with the replicas first.
            slices = [tf.squeeze(x, 0) for x in slices]
            return tf.import_graph_def(
                cluster, {a.name: x for a, x in zip(arguments, slices)}, outputs, name=""
            )

        wrapped = tf.wrap_function(
            whole, [tf.TensorSpec([1, *x.shape.as_list()], x.dtype) for x, *_ in sources]
        )
        self.dtypes = [np.dtype(x.dtype.as_numpy_dtype) for x in wrapped.outputs]
        module = tf.mlir.experimental.convert_function(wrapped)
        self.stablehlo = _plain(tf.mlir.experimental.run_pass_pipeline(module, PASSES))

    @contextlib.contextmanager
    def _session(self, tf):
        options = tf.GraphOptions(place_pruned_graph=True)  # nothing of the program can be placed
        config = tf.ConfigProto(graph_options=options, allow_soft_placement=True)
        with tf.Session(graph=self.graph, config=config) as session:
            for operation in self._start:
                session.run(operation)
            yield session

    @contextlib.contextmanager
    def session_after(self, results):
        """Opens a session in which variables have the values that the replicas assigned.

        Args:
          results: what `run` returns for the program.
        """
        import tensorflow.compat.v1 as tf

        first = len(self.dtypes) - len(self.assigned)
        with self.graph.as_default(), self._session(tf) as session:
            for i, op in enumerate(self.assigned):
                for handle, outputs in zip(op.inputs, results):
                    with tf.device(handle.device):
                        session.run(
                            tf.raw_ops.AssignVariableOp(
                                resource=handle, value=tf.constant(outputs[first + i])
                            )
                        )
            yield session


@contextlib.contextmanager
def _loops_that_lower(tf):
    """Has loops be While operations."""
    before = tf.control_flow_v2_enabled()
    tf.enable_control_flow_v2()
    try:
        yield
    finally:
        if not before:
            tf.disable_control_flow_v2()


def _cluster(tf, graph):
    """Returns the GraphDef of what runs on a TPU, as plain operations."""
    whole = graph.as_graph_def(add_shapes=False)
    cluster = tf.GraphDef()
    cluster.library.CopyFrom(whole.library)
    cluster.versions.CopyFrom(whole.versions)
    inside = {
        node.name
        for node in whole.node
        if REPLICATE in node.attr and node.op != "TPUReplicateMetadata"
    }
    for node in whole.node:
        if node.name not in inside:
            continue
        copy = cluster.node.add()
        copy.CopyFrom(node)
        copy.device = ""
        del copy.attr[REPLICATE]
        kept = [i for i in node.input if not i.startswith("^") or i[1:] in inside]
        del copy.input[:]
        copy.input.extend(kept)
    return cluster


def _captured(operations):
    """Returns what operations of the program use from the host."""
    inside = [op for op in operations if REPLICATE in op.node_def.attr]
    captured = {
        x.ref(): x
        for op in inside
        for x in op.inputs
        if REPLICATE not in x.op.node_def.attr and x.op.type != "TPUReplicatedInput"
    }
    return list(captured.values())


def _values(tf, argument, replicas):
    """Returns what each replica gets for an argument: its own part, the same, or a variable's."""
    if argument.op.type != "TPUReplicatedInput":
        return [argument] * replicas
    if argument.dtype != tf.resource:
        return list(argument.op.inputs)
    read, *_ = (op for op in argument.consumers() if op.type == "ReadVariableOp")
    values = []
    with argument.graph.as_default():
        for handle in argument.op.inputs:
            with tf.device(handle.device):
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=read.get_attr("dtype"))
                value.set_shape(read.outputs[0].shape)
                values.append(value)
    return values


ASSIGNMENTS = {
    "AssignVariableOp": "Identity",
    "AssignAddVariableOp": "AddV2",
    "AssignSubVariableOp": "Sub",
    "ResourceApplyGradientDescent": "Sub",
}


def _without_resource(cluster, variable):
    """Has operations work on the value of a variable in place of the resource.

    It may be assigned to once, and what reads it must be ordered with respect to that.

    Returns:
      The name of the node that has the value assigned; None if there is none.
    """
    nodes = {node.name: node for node in cluster.node}
    users = variable.outputs[0].consumers()
    assignments = [op for op in users if op.type in ASSIGNMENTS]
    reads = [op for op in users if op.type == "ReadVariableOp"]
    if len(assignments) > 1 or len(assignments) + len(reads) < len(users):
        raise ValueError(f"{variable.name} is used by {[op.type for op in users]}")
    for op in users:
        node = nodes[op.name]
        node.op = ASSIGNMENTS.get(op.type, "Identity")
        dtype = node.attr["dtype" if "dtype" in node.attr else "T"].type
        node.attr.clear()
        node.attr["T"].type = dtype
        if op.type == "ResourceApplyGradientDescent":  # inputs: variable, rate, gradient
            scaled = cluster.node.add(name=f"{node.name}_scaled", op="Mul", input=node.input[1:3])
            scaled.attr["T"].type = dtype
            node.input[1] = scaled.name
            del node.input[2]
    for assignment in assignments:
        if assignment.type == "AssignVariableOp":
            del nodes[assignment.name].input[0]
        for read in reads:
            if _comes_before(assignment, read):
                nodes[read.name].input[0] = assignment.name
            elif not _comes_before(read, assignment):
                raise ValueError(f"{read.name} may come before {assignment.name} or after it")
    return assignments[0].name if assignments else None


def _comes_before(first, last):
    """Whether an operation waits for another one."""
    seen, waiting = {last}, [last]
    while waiting:
        op = waiting.pop()
        before = {x.op for x in op.inputs} | set(op.control_inputs)
        waiting += before - seen
        seen |= before
    return first in seen


def _plain(module):
    """Returns a module of StableHLO alone."""
    module = re.sub(
        r'(%\w+) = "(?:mhlo|stablehlo)\.cross-replica-sum"\((%\w+)\) <\{(.*?)\}> : (.*)',
        _all_reduce,
        module,
    )
    module = re.sub(
        r'"tf.RandomUniformInt"\((%\w+), (%\w+), (%\w+)\) <\{.*?\}> \{.*?\} : \((.*?), (.*?), (.*?)\) ->',
        r'"stablehlo.rng"(\2, \3, \1) '
        r"<{rng_distribution = #stablehlo<rng_distribution UNIFORM>}> : (\5, \6, \4) ->",
        module,
    )
    module = re.sub(
        r'%(\w+) = "tf.ReciprocalGrad"\((\S+), (\S+)\) \{.*?\} : \((\S+), \S+\) -> \S+',
        r"%square_\1 = stablehlo.multiply \2, \2 : \4\n"
        r"%product_\1 = stablehlo.multiply %square_\1, \3 : \4\n"
        r"%\1 = stablehlo.negate %product_\1 : \4",
        module,
    )
    module = re.sub(r"module attributes \{[^\n]*\n", "module @m {\n", module)
    module = module.replace("module {", "module @m {", 1)
    module = re.sub(r"attributes \{.*?\} \{\n", "{\n", module)
    module = re.sub(r"\{tf\._user_specified_name = \"[^\"]*\"\}", "", module)
    module = re.sub(r"@__inference_\w+", "@main", module)
    unknown = set(re.findall(r"\"?\b((?:tf|mhlo|chlo)\.[\w-]+)", module))
    if unknown:
        raise ValueError(f"not lowered to StableHLO: {sorted(unknown)} in\n{module}")
    return module


def _all_reduce(match):
    result, argument, groups, types = match.groups()
    element = re.search(r"tensor<(?:\d+x)*(\w+)>", types).group(1)
    scalar = f"tensor<{element}>"
    return (
        f'{result} = "stablehlo.all_reduce"({argument}) <{{{groups}}}> ({{\n'
        f"^bb0(%x: {scalar}, %y: {scalar}):\n"
        f"  %z = stablehlo.add %x, %y : {scalar}\n"
        f"  stablehlo.return %z : {scalar}\n"
        f"}}) : {types}"
    )


# -- the process that runs programs


def main(directory, count):
    import jax

    jax.config.update("jax_enable_x64", True)
    for i in range(count):
        with open(os.path.join(directory, f"{i}.mlir")) as f:
            text = f.read()
        with np.load(os.path.join(directory, f"{i}.inputs.npz")) as saved:
            inputs = [saved[key] for key in sorted(saved.files)]
        outputs = execute(jax, text, inputs)
        np.savez(
            os.path.join(directory, f"{i}.outputs.npz"),
            **{f"{j:03}": x for j, x in enumerate(outputs)},
        )


def execute(jax, text, inputs):
    """Returns arrays with the replicas first."""
    from jax._src import compiler, xla_bridge
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jaxlib.mlir import ir

    backend = xla_bridge.get_backend("cpu")
    devices = backend.local_devices()
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
    options = compiler.get_compile_options(
        num_replicas=len(devices),
        num_partitions=1,
        device_assignment=np.arange(len(devices)).reshape(-1, 1),
    )
    if hasattr(compiler, "backend_compile_and_load"):
        program = compiler.backend_compile_and_load(
            backend, module, xla_client.DeviceList(tuple(devices)), options, []
        )
    else:
        program = backend.compile(str(module), options)
    rows = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(devices), ("r",)), jax.sharding.PartitionSpec("r")
    )
    types = re.findall(r"%arg\d+: tensor<([\w]+)>", text[: text.index("{\n", text.index("@main"))])
    arrays = []
    for x, kind in zip(inputs, types):
        if kind.endswith("bf16"):
            x = x.view(jax.numpy.bfloat16)
        parts = [jax.device_put(x[r : r + 1], d) for r, d in enumerate(devices)]
        arrays.append(jax.make_array_from_single_device_arrays(x.shape, rows, parts))
    results = program.execute_sharded(arrays).disassemble_into_single_device_arrays()
    stacked = [np.stack([np.asarray(x) for x in result]) for result in results]
    return [_bits(x) for x in stacked]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
