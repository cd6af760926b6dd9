"""All tables of calls, by family."""

from helpers.oracle.calls.call_table_core import CORE
from helpers.oracle.calls.call_table_layers import BERT, LAYERS, OPTIMIZE
from helpers.oracle.calls.call_table_mesh import MESH
from helpers.oracle.calls.call_table_ops import ELEMENTWISE, OPERATIONS, STRUCTURE
from helpers.oracle.calls.call_table_transformer import DATA, TRANSFORMER

FAMILIES = {
    "core": CORE,
    "elementwise": ELEMENTWISE,
    "structure": STRUCTURE,
    "operations": OPERATIONS,
    "mesh": MESH,
    "layers": LAYERS,
    "optimize": OPTIMIZE,
    "bert": BERT,
    "transformer": TRANSFORMER,
    "data": DATA,
}
