"""Processors of one process that share their memory: equal nodes are computed once.

`replicate` traces one program. For processors of one memory, that is CPUs of one process,
`Sharing` derives a function for each of them, in which

- a value that is equal on several processors is computed by the first of these, and the others
  get it by reference, through TensorFlow's own rendezvous (Send and Recv);
- a collective becomes a computation with the tensors of the other processors, which come in the
  same way. What is equal on several processors, such as a sum, is computed by the first of them.

- equal slices are one variable, which only the first of these processors reads and assigns to.

So replicated values and collectives cost what they cost with PlacementMeshImpl. Which values are
equal follows from value numbering: an operation without side effects gives the same result on two
processors if its inputs are the same, and slices of a variable are equal if they begin at the same
place.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.simd.program import ALLGATHER, ALLTOALL, PERMUTE, Exchange

if TYPE_CHECKING:
    from tensorflow.core.framework.function_pb2 import FunctionDef
    from tensorflow.types.experimental import ConcreteFunction

    from mesh_tensorflow._mesh.simd.program import SimdProgram


# Below this many elements, computing a value again costs less than handing it over.
LEAST_ELEMENTS = 1024
# Operations that cost nothing, or would force a copy of a variable if their value is held.
_KEPT = (
    "Const",
    "Placeholder",
    "Identity",
    "Reshape",
    "ReadVariableOp",
    "ExpandDims",
    "Squeeze",
    "StopGradient",
    "Shape",
)
_NO_VALUE = (tf.resource, tf.variant, tf.string)


class Node:
    """A node of a program, with where its values are equal and where they are computed.

    Attributes:
      definition: its NodeDef in the program's FunctionDef.
      operation: the tf.Operation of the traced graph, or one that the node waits for.
      equal: for each processor, the first one on which the node has the same value.
      at: for each processor, the one that computes the value it uses.
      exchange: the Exchange that the node stands for, or None.
      variable: the name of the input that is a variable of several processors, or None.
    """

    def __init__(
        self, definition: tf.NodeDef, operation: tf.Operation, exchange: Optional[Exchange]
    ):
        self.definition = definition
        self.operation = operation
        self.exchange = exchange
        self.variable: Optional[str] = None
        self.equal: list[int] = []
        self.at: list[int] = []

    @property
    def data_inputs(self) -> list[str]:
        """Names of its input tensors, in the form of FunctionDefs."""
        return [name for name in self.definition.input if not name.startswith("^")]

    @property
    def control_inputs(self) -> list[str]:
        """Names of the nodes that it waits for."""
        return [name[1:] for name in self.definition.input if name.startswith("^")]

    @property
    def is_collective(self) -> bool:
        """Whether it is one of TensorFlow's collectives."""
        return self.definition.op.startswith("Collective")

    def is_pure(self) -> bool:
        """Whether equal inputs give equal values; all processors read a variable at one point."""
        op = self.operation
        # Stateful for TensorFlow, but a node reads at one point of the program on all processors,
        # so that equal slices have equal values there.
        if op.type == "ReadVariableOp":
            return True
        # What a loop or a condition calls may have effects that its own node does not tell.
        has_function = any(a.HasField("func") for a in self.definition.attr.values())
        return not (op.op_def.is_stateful or has_function)

    def is_worth_sharing(self) -> bool:
        """Whether handing its value over costs less than computing it again."""
        op = self.operation
        if op.type in _KEPT or op.control_inputs or any(t.dtype in _NO_VALUE for t in op.outputs):
            return False
        # Inputs count, too: the sum of a large tensor costs what reading all of it does.
        sizes = [t.shape.num_elements() or 0 for t in [*op.inputs, *op.outputs]]
        return max(sizes, default=0) >= LEAST_ELEMENTS


_BINARY = {"SUM": "AddV2", "MAX": "Maximum", "MIN": "Minimum"}


def constant_node(name: str, value: Union[bool, int]) -> tf.NodeDef:
    """Returns a node with a scalar constant: a bool, or an int32."""
    node = tf.NodeDef(name=name, op="Const")
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    node.attr["dtype"].type = node.attr["value"].tensor.dtype
    return node


def output_name(exchange: Exchange) -> str:
    """Returns the name of the output of the last node of an exchange."""
    if _is_one_sum(exchange):
        return "sum"
    return "output" if _is_copy(exchange) or exchange.kind not in _BINARY else "z"


def exchange_nodes(
    exchange: Exchange,
    pnum: int,
    name: str,
    inputs: Sequence[str],
    waits: Sequence[str],
    dtype: tf.DType,
) -> list[tf.NodeDef]:
    """Returns the nodes that make a processor's result of an exchange.

    Args:
      exchange: the Exchange.
      pnum: the processor.
      name: the name of the last node.
      inputs: names of the tensors of the processor's sources, in their order.
      waits: control inputs, each "^" and the name of a node.
      dtype: their dtype.
    """
    if _is_copy(exchange):
        made = [tf.NodeDef(name=name, op="Identity", input=[*inputs, *waits])]
    elif exchange.kind == ALLGATHER:
        made = _concatenated(name, inputs, waits)
    elif exchange.kind == ALLTOALL:
        made = _parts_stacked(name, exchange.part_of(pnum), inputs, waits)
    elif _is_one_sum(exchange):
        made = [tf.NodeDef(name=name, op="AddN", input=[*inputs, *waits])]
        made[0].attr["N"].i = len(inputs)
    else:
        made = _reduced_in_turn(_BINARY[exchange.kind], name, inputs, waits)
    for node in made:
        if node.op != "Const":
            node.attr["T"].type = dtype.as_datatype_enum
    return made


def _is_copy(exchange: Exchange) -> bool:
    return len(exchange.sources[0]) == 1 and exchange.kind != ALLTOALL


def _is_one_sum(exchange: Exchange) -> bool:
    # AddN reads all inputs in one pass, without a partial sum in memory for each.
    return exchange.kind == "SUM" and len(exchange.sources[0]) > 2


def _concatenated(name: str, inputs: Sequence[str], waits: Sequence[str]) -> list[tf.NodeDef]:
    """Returns nodes that concatenate the inputs along their first dimension."""
    axis = constant_node(f"{name}/axis", 0)
    node = tf.NodeDef(name=name, op="ConcatV2", input=[*inputs, f"{axis.name}:output:0", *waits])
    node.attr["N"].i = len(inputs)
    node.attr["Tidx"].type = tf.int32.as_datatype_enum
    return [axis, node]


def _parts_stacked(
    name: str, part: Optional[int], inputs: Sequence[str], waits: Sequence[str]
) -> list[tf.NodeDef]:
    """Returns nodes that stack one part of each input; all inputs have a part for each input."""
    made = []
    # Unpack of the first dimension copies nothing where parts are aligned.
    for i, tensor in enumerate(inputs):
        made.append(tf.NodeDef(name=f"{name}/parts_{i}", op="Unpack", input=[tensor, *waits]))
        made[-1].attr["num"].i = len(inputs)
    made.append(tf.NodeDef(name=name, op="Pack", input=[f"{p.name}:output:{part}" for p in made]))
    made[-1].attr["N"].i = len(inputs)
    for node in made:
        node.attr["axis"].i = 0
    return made


def _reduced_in_turn(
    op: str, name: str, inputs: Sequence[str], waits: Sequence[str]
) -> list[tf.NodeDef]:
    """Returns nodes that reduce the inputs one after another, in their order."""
    made = []
    # In one order always, so that results are the same in each run.
    total, last = inputs[0], len(inputs) - 1
    for i, tensor in enumerate(inputs[1:], 1):
        part = name if i == last else f"{name}/part_{i}"
        made.append(tf.NodeDef(name=part, op=op, input=[total, tensor, *waits]))
        total = f"{part}:z:0"
    return made


class Sharing:
    """The functions of the processors of one memory.

    Value numbering is that of Alpern, Wegman and Zadeck, "Detecting equality of variables in
    programs", POPL 1988, between processors in place of operations.
    """

    def __init__(
        self,
        function: ConcreteFunction,
        program: SimdProgram,
        arguments: Sequence[Sequence[Hashable]],
        addresses: Sequence[str],
        variables: Collection[int] = (),
    ):
        """Finds the nodes that each processor computes.

        Args:
          function: the concrete function of the program, of which `mismatch` is None.
          program: the SimdProgram, with the graph of the function and what is known of it.
          arguments: for each processor, a key for each argument: arguments with the same key have
            the same value.
          addresses: for each processor, a name in the form of a TensorFlow device; all of one
            process.
          variables: indices of the arguments that are variables which several processors share.
        """
        self._definition = function.function_def
        self._tables = program.tables
        self._addresses = list(addresses)
        self._everyone = range(len(addresses))
        names = [argument.name for argument in self._definition.signature.input_arg]
        self._arguments = {
            name: _first_equal([[keys[i]] for keys in arguments]) for i, name in enumerate(names)
        }
        self._variables = {names[i] for i in variables}
        operations = {op.name: op for op in program.graph.get_operations()}
        self._nodes = {
            node.name: Node(node, operations[node.name], program.exchanges.get(node.name))
            for node in self._definition.node_def
        }
        self._dtypes: dict[str, tf.DType] = {
            self._definition.ret[arg.name]: output.dtype
            for arg, output in zip(self._definition.signature.output_arg, function.graph.outputs)
        }
        for op in program.graph.get_operations():  # inputs come before their consumers
            if op.name in self._nodes:
                node = self._nodes[op.name]
                self._dtypes.update(zip(node.data_inputs, [x.dtype for x in op.inputs]))
                self._number(node)
        exchanges = [node.exchange for node in self._nodes.values() if node.exchange is not None]
        # A shift is two nodes of TensorFlow and one Exchange: that which sends is not needed.
        self._only_send = {exchange.sent_by for exchange in exchanges}
        self._required = [self._required_by(p) for p in self._everyone]
        self._kept: list[set[str]] = [set() for _ in self._everyone]
        self._sent: dict[tuple[str, int, int], None] = {}  # tensors, from, to; in order
        self._keep_what_is_needed()

    def _required_by(self, processor: int) -> list[str]:
        """Returns names of the nodes with side effects that a processor runs.

        If one member of a group skipped a collective, the others would deadlock.
        """
        required = set(self._definition.control_ret.values())
        return [
            name
            for name, node in self._nodes.items()
            if (name in required or node.is_collective)
            and node.exchange is None
            and name not in self._only_send
            and (node.variable is None or node.at[processor] == processor)
        ]

    # -- what is where

    def _number(self, node: Node) -> None:
        """Finds the processors on which a node has the same value, and those that compute it."""
        everyone = list(self._everyone)
        if node.exchange is not None:
            self._number_exchange(node, node.exchange)
            return
        table = self._tables.get(node.definition.name)
        if table is not None:
            # By the entries: the inputs of the lookup, the processors' numbers, are all different.
            node.equal = _first_equal([[key] for key in table])
        elif node.is_pure():
            inputs = [self._equal(name) for name in node.data_inputs]
            node.equal = _first_equal([[equal[p] for equal in inputs] for p in everyone])
        else:
            # Effects and random numbers differ even with equal inputs.
            node.equal = everyone
        node.variable = next(filter(self._variables.__contains__, node.data_inputs), None)
        if node.variable is not None:
            # Only the owner reads and assigns: a second assignment would add an update twice.
            node.at = self._arguments[node.variable]
        else:
            node.at = node.equal if node.is_worth_sharing() else everyone

    def _number_exchange(self, node: Node, exchange: Exchange) -> None:
        """As `_number`: results are equal if the same tensors are taken in the same order."""
        taken = self._equal(self._exchanged(node, exchange))
        keys = [
            [exchange.part_of(p), *[taken[source] for source in exchange.sources[p]]]
            for p in self._everyone
        ]
        # The order counts, since floating-point addition is not associative.
        node.equal = _first_equal(keys)
        # What one processor has as it is, the others get from there, not in two steps.
        node.at = list(self._everyone) if exchange.kind == PERMUTE else node.equal

    def _exchanged(self, node: Node, exchange: Exchange) -> str:
        """Returns the name of the tensor of which an exchange takes several processors' values."""
        takes = node if exchange.sent_by is None else self._nodes[exchange.sent_by]
        return takes.data_inputs[0]

    def _equal(self, tensor: str) -> list[int]:
        name = tensor.split(":")[0]
        return self._arguments[name] if name in self._arguments else self._nodes[name].equal

    def _place(self, tensor: str, processor: int) -> int:
        """Returns the processor that computes a tensor for a processor."""
        name = tensor.split(":")[0]
        return processor if name in self._arguments else self._nodes[name].at[processor]

    def _keep_what_is_needed(self) -> None:
        """Finds the nodes that each processor runs, and the tensors that they send each other."""
        waiting: collections.deque[tuple[str, int]] = collections.deque(
            (name, p) for p, required in enumerate(self._required) for name in required
        )

        def need(tensor: str, owner: int, processor: int) -> None:
            place = self._place(tensor, owner)
            if place != processor:
                self._sent[tensor, place, processor] = None
            waiting.append((tensor.split(":")[0], place))

        for arg in self._definition.signature.output_arg:  # only processor 0 returns results
            need(self._definition.ret[arg.name], 0, 0)
        while waiting:
            name, processor = waiting.popleft()
            if name in self._arguments or name in self._kept[processor]:
                continue
            # Each node once on each processor, however many others need it.
            self._kept[processor].add(name)
            node = self._nodes[name]
            for tensor, owner in self._taken(node, processor):
                need(tensor, owner, processor)
            for tensor in self._waits_for(node, processor):
                need(tensor, processor, processor)

    def _taken(self, node: Node, processor: int) -> Iterator[tuple[str, int]]:
        """Yields the input tensors of a node, each with the processor that computes it."""
        if node.exchange is None:
            for tensor in node.data_inputs:
                yield tensor, processor
        else:
            for source in node.exchange.sources[processor]:
                yield self._exchanged(node, node.exchange), source

    def _waits_for(self, node: Node, processor: int) -> list[str]:
        """Returns the control inputs of a node, as tensors.

        Collectives are left out of those of collectives: TensorFlow makes them wait for each other,
        but their nodes here may run in any order. Those that only send have no nodes here, and
        neither have the arguments, which are there before anything runs.
        """
        return [
            self._first_output(self._nodes[name], processor)
            for name in node.control_inputs
            if name not in self._only_send
            and name not in self._arguments  # which are there before any node
            and not (node.is_collective and self._nodes[name].is_collective)
        ]

    def _first_output(self, node: Node, processor: int) -> str:
        """Returns the name of a node's first output, or of the node if it has none.

        If another processor runs a node without outputs, that of a constant that waits for it.
        """
        name = node.definition.name
        if not node.operation.outputs:
            return name if node.at[processor] == processor else self._done(node)
        tensor = f"{name}:{node.operation.op_def.output_arg[0].name}:0"
        self._dtypes[tensor] = node.operation.outputs[0].dtype
        return tensor

    def _done(self, node: Node) -> str:
        """Returns the name of a tensor that is there when a node has run."""
        made = constant_node(f"{node.definition.name}/has_run", True)
        made.input.append("^" + node.definition.name)
        # New while needs are found. Later all are there, since making functions iterates over them.
        if made.name not in self._nodes:
            done = self._nodes[made.name] = Node(made, node.operation, None)
            done.equal, done.at = list(self._everyone), node.at
        tensor = f"{made.name}:output:0"
        self._dtypes[tensor] = tf.bool
        return tensor

    # -- the functions

    def functions(self) -> list[FunctionDef]:
        """Returns a FunctionDef for each processor.

        That of processor 0 has the outputs of the program; the others have one output, `True`.
        """
        return [self._function(processor) for processor in self._everyone]

    def _function(self, processor: int) -> FunctionDef:
        made = type(self._definition)()
        made.CopyFrom(self._definition)
        del made.node_def[:]
        made.attr["_noinline"].b = False  # else its Sends would be seen by its own Recvs only
        made.signature.name += f"_on_{processor}"
        for node in self._nodes.values():
            if node.definition.name in self._kept[processor]:
                made.node_def.extend(self._rewritten(node, processor))
        results = dict(made.ret)
        made.ret.clear()
        if processor == 0:
            for key, tensor in results.items():
                made.ret[key] = self._local(tensor, processor, processor)
        else:
            del made.signature.output_arg[:]
            made.signature.output_arg.add(name="done", type=tf.bool.as_datatype_enum)
            # `results_of` waits for a call by its first output.
            made.node_def.append(constant_node("done", True))
            made.ret["done"] = "done:output:0"
        self._set_control_outputs(made, processor)
        return made

    def _set_control_outputs(self, made: FunctionDef, processor: int) -> None:
        """Adds Send and Recv nodes to a function, and makes it run all that have side effects."""
        # What no output needs would be left out, and whoever receives a value would wait forever.
        outputs = {name: name for name in self._required[processor]}
        for tensor, sender, receiver in self._sent:
            if processor == sender:
                node = self._send(tensor, receiver, sender)
                made.node_def.append(node)
                outputs[node.name] = node.name
            elif processor == receiver:
                made.node_def.append(self._receive(tensor, sender, receiver))
        made.control_ret.clear()
        made.control_ret.update(outputs)
        del made.signature.control_output[:]
        made.signature.control_output.extend(outputs)

    def _rewritten(self, node: Node, processor: int) -> list[tf.NodeDef]:
        """Returns the nodes that a processor runs in place of a node of the program."""
        inputs = [
            self._local(tensor, processor, owner) for tensor, owner in self._taken(node, processor)
        ]
        waits = [
            "^" + self._local(tensor, processor, processor).split(":")[0]
            for tensor in self._waits_for(node, processor)
        ]
        if node.exchange is not None:
            dtype, name = node.operation.outputs[0].dtype, node.definition.name
            return exchange_nodes(node.exchange, processor, name, inputs, waits, dtype)
        made = tf.NodeDef()
        made.CopyFrom(node.definition)
        del made.input[:]
        made.input.extend([*inputs, *waits])
        return [made]

    def _local(self, tensor: str, processor: int, owner: int) -> str:
        """Returns the name, in a processor's function, of a tensor as its owner uses it."""
        place = self._place(tensor, owner)
        if place != processor:
            return _name("from", place, tensor) + ":tensor:0"
        node = self._nodes.get(tensor.split(":")[0])
        # The nodes in place of a collective have outputs of other names than its own.
        if node is not None and node.exchange is not None and ":" in tensor:
            return f"{node.definition.name}:{output_name(node.exchange)}:0"
        return tensor

    # -- what is sent

    def _transfer(self, op: str, name: str, tensor: str, sender: int, receiver: int) -> tf.NodeDef:
        node = tf.NodeDef(name=name, op=op)
        # All programs of a step have one rendezvous; the name of the function tells them apart.
        node.attr["tensor_name"].s = f"{self._definition.signature.name}/{tensor}".encode()
        node.attr["send_device"].s = self._addresses[sender].encode()
        # Part of the rendezvous' key, in which sender and receiver only have to agree.
        node.attr["send_device_incarnation"].i = 1
        node.attr["recv_device"].s = self._addresses[receiver].encode()
        node.attr["client_terminated"].b = False
        return node

    def _send(self, tensor: str, receiver: int, sender: int) -> tf.NodeDef:
        node = self._transfer("Send", _name("to", receiver, tensor), tensor, sender, receiver)
        node.attr["T"].type = self._dtype(tensor)
        node.input.append(self._local(tensor, sender, sender))
        return node

    def _receive(self, tensor: str, sender: int, receiver: int) -> tf.NodeDef:
        node = self._transfer("Recv", _name("from", sender, tensor), tensor, sender, receiver)
        node.attr["tensor_type"].type = self._dtype(tensor)
        return node

    def _dtype(self, tensor: str) -> int:
        return self._dtypes[tensor].as_datatype_enum


def _first_equal(keys: Sequence[Sequence[Hashable]]) -> list[int]:
    """Returns for each processor the first one with the same key."""
    first: dict[tuple, int] = {}
    return [first.setdefault(tuple(key), p) for p, key in enumerate(keys)]


def _name(direction: str, processor: int, tensor: str) -> str:
    return f"{direction}_{processor}/{tensor.replace(':', '/')}"
