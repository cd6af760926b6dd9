"""Faults in meshes: layouts, collectives, processors, slices of variables, random values."""

from fault import Fault

FAULTS = [
    Fault(
        "_core/pending.py",
        "self._pending[x].summed = True",
        "self._pending[x].summed = False",
        "a sum that two operations read is counted twice by the cost model",
        "test_cases.py -k 'test_layouts and batch_norm'",
    ),
    Fault(
        "_lowering/lowering.py",
        "elements = requested.laid_out_size(x.shape)",
        "elements = requested.slice_size(x.shape)",
        "allreduces are counted for one processor instead of for all",
        "mesh/test_counters.py",
    ),
    Fault(
        "_mesh/mesh_impl.py",
        "x.mesh_impl is first.mesh_impl and x.mesh_axes == first.mesh_axes",
        "x.mesh_impl is first.mesh_impl",
        "sums over different mesh axes are added before they are made",
        "mesh/test_counters.py -k different_axes",
    ),
    Fault(
        "_mesh/placement.py",
        "for i in range(n - 2, middle, -1):",
        "for i in range(n - 2, middle + 1, -1):",
        "an allreduce over a ring leaves out the tensor next to the middle",
        "mesh/test_collectives.py -k allreduce_ring",
    ),
    Fault(
        "placement_mesh_impl.py",
        "key = (self._domains[pnum], *map(id, arguments))",
        "key = tuple(map(id, arguments))",
        "what is equal is computed once for all memories, not once in each",
        "mesh/test_collectives.py -k each_memory",
    ),
    Fault(
        "_mesh/simd/collectives.py",
        "return self._or_zeros(y, mesh_axis, source_pcoord)",
        "return y if cycle else self._or_zeros(y, mesh_axis, source_pcoord)",
        "processors that receive nothing keep what was sent to fill the permutation",
        "test_cases.py -k 'test_layouts and shift'",
    ),
    Fault(
        "_mesh/simd/collectives.py",
        "if full else []",
        "if full and not last else []",
        "sends and receives of a SIMD program all begin at once",
        "mesh/test_simd_programs.py -k few_collectives",
    ),
    Fault(
        "simd_mesh_impl.py",
        "group > self._wide_groups",
        "group >= self._wide_groups",
        "sums of the largest groups for bfloat16 are made in float32",
        "mesh/test_simd.py -k bfloat16",
    ),
    Fault(
        "_mesh/tpu_program.py",
        "[group[source], group[target]]",
        "[group[target], group[source]]",
        "a permutation of TPU cores goes backwards",
        "mesh/test_tpu_collectives.py -k permute",
    ),
    Fault(
        "_mesh/variables/slice_variables.py",
        "[self._assign(pnum, value) for pnum in pnums]",
        "[self._assign(pnum, value) for pnum in pnums[:1]]",
        "of equal slices on several devices only the first is restored",
        "mesh/test_masters.py -k savers",
    ),
    Fault(
        "_mesh/variables/store.py",
        "and part == (there.begin(number), there.sizes)",
        "and part[0] == there.begin(number)",
        "a slice is used again in a layout in which it has another size",
        "test_eager.py -k layouts_in_turn",
    ),
    Fault(
        "_mesh/random_values.py",
        "zlib.crc32(name.encode()) % 2**31",
        'zlib.crc32(name.split("/")[-1].encode()) % 2**31',
        "variables of one name in different scopes begin with the same values",
        "ops/test_random.py -k two_scopes",
    ),
    Fault(
        "_mesh/random_values.py",
        "tf.cast(index, tf.uint32) * _u32(4)",
        "tf.cast(index, tf.uint32)",
        "the keys of successive steps have parts in common",
        "ops/test_random.py -k keys_of_iterations",
    ),
    Fault(
        "checkpoint.py",
        "(tuple(shapes[n]) != w.shape or dtypes[n] != w.dtype)",
        "tuple(shapes[n]) != w.shape",
        "variables of other dtypes than in the checkpoint are not named",
        "mesh/test_damaged_checkpoints.py -k another_dtype",
    ),
]
