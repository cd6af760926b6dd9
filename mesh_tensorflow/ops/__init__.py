"""Operations on tensors with named dimensions, and the classes they are built from."""

from mesh_tensorflow._core.errors import MeshTensorFlowWarning, strict
from mesh_tensorflow._core.graph import Graph, Mesh
from mesh_tensorflow._core.layout import (
    LayoutRules,
    TensorLayout,
    convert_to_layout_rules,
    pnum_to_group,
    pnum_to_processor_coordinates,
    processor_coordinates_to_pnum,
    processor_groups,
    tensor_dim_to_mesh_dim_size,
    tensor_dim_to_size_per_split,
)
from mesh_tensorflow._core.operation import Operation, Tensor
from mesh_tensorflow._core.shape import (
    Dimension,
    Shape,
    anonymous_shape,
    combined_dimension,
    convert_to_dimension,
    convert_to_shape,
    is_subsequence,
    list_product,
    transpose_list_of_lists,
    verify_no_new_dims,
)
from mesh_tensorflow._mesh.devices import parallel, session_config
from mesh_tensorflow._mesh.gspmd import GspmdMeshImpl
from mesh_tensorflow._mesh.mesh_impl import (
    LaidOutTensor,
    LazyAllreduceSum,
    LazyLaidOutTensor,
    MeshImpl,
    compatible_lazy_allreduce_sums,
    convert_args_to_laid_out_tensors,
)
from mesh_tensorflow._mesh.slice_functions import binary_reduction_fn, reduction_fn
from mesh_tensorflow._mesh.tpu_program import (
    pnum_to_processor_coordinates_nd,
    processor_coordinates_to_pnum_map_nd,
)
from mesh_tensorflow._mesh.variables.storage import LaidOutVariable
from mesh_tensorflow._mesh.variables.store import VariableStore, function
from mesh_tensorflow._replaced import replaceable as _replaceable
from mesh_tensorflow.ops._contractions.conv import *
from mesh_tensorflow.ops._contractions.einsum import *
from mesh_tensorflow.ops._contractions.einsum import _einsum_helper as _einsum_helper
from mesh_tensorflow.ops._contractions.pool import *
from mesh_tensorflow.ops._contractions.reduce_broadcast import *
from mesh_tensorflow.ops._contractions.softmax import *
from mesh_tensorflow.ops._control.control import *
from mesh_tensorflow.ops._control.gradients import *
from mesh_tensorflow.ops._control.while_loop import *
from mesh_tensorflow.ops._elementwise.binary import *
from mesh_tensorflow.ops._elementwise.operators import *
from mesh_tensorflow.ops._elementwise.slicewise import *
from mesh_tensorflow.ops._elementwise.unary import *
from mesh_tensorflow.ops._microbatches import *
from mesh_tensorflow.ops._movement.gather import *
from mesh_tensorflow.ops._movement.halo import *
from mesh_tensorflow.ops._movement.index import *
from mesh_tensorflow.ops._movement.reshape import *
from mesh_tensorflow.ops._movement.split_concat import *
from mesh_tensorflow.ops._random import *
from mesh_tensorflow.ops._source import *
from mesh_tensorflow.ops._variable import *

# Lowerings use operations, so they come after them.
from mesh_tensorflow._lowering.lowering import (  # isort: skip
    Lowering,
    log_variable_sizes,
    pretty_print_counters,
)
from mesh_tensorflow._lowering.values import *  # isort: skip

_replaceable(__name__)
