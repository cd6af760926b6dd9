"""All tables of calls, by family."""

from call_table_core import CORE
from call_table_layers import BERT, LAYERS, OPTIMIZE
from call_table_mesh import MESH
from call_table_ops import ELEMENTWISE, OPERATIONS, STRUCTURE
from call_table_transformer import DATA, TRANSFORMER

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
