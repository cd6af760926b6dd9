"""Calls of processors' helpers, mesh implementations and lowering."""

MESH = """
pnum_to_processor_coordinates @ mtf.pnum_to_processor_coordinates mesh_shape:mesh_shape pnum:pnum
> mtf.pnum_to_processor_coordinates(S([rows, cols]), 2)
> mtf.pnum_to_processor_coordinates([2, 3], 4)
processor_coordinates_to_pnum @ mtf.processor_coordinates_to_pnum mesh_shape:mesh_shape coord:filter{[1, 0]}
> mtf.processor_coordinates_to_pnum(S([rows, cols]), [1, 1])
> mtf.processor_coordinates_to_pnum(S([rows, cols]), [1])
> mtf.processor_coordinates_to_pnum(S([rows, cols]), [-1, 0])
> mtf.processor_coordinates_to_pnum(S([rows, cols]), np.array([1, 1]))
> mtf.processor_coordinates_to_pnum(S([]), [])
pnum_to_group @ mtf.pnum_to_group mesh_shape:mesh_shape group_dims:axes pnum:pnum
> mtf.pnum_to_group(S([rows, cols]), [0, 1], 3)
processor_groups @ mtf.processor_groups mesh_shape:mesh_shape group_dims:axes
> mtf.processor_groups(S([rows, cols]), [1])
pnum_to_processor_coordinates_nd @ mtf.pnum_to_processor_coordinates_nd -
> mtf.pnum_to_processor_coordinates_nd(None, 0, None)
processor_coordinates_to_pnum_map_nd @ mtf.processor_coordinates_to_pnum_map_nd -
> mtf.processor_coordinates_to_pnum_map_nd(None, None, None)
MeshImpl @ mtf.MeshImpl shape:mesh_shape layout_rules:layout
> mtf.MeshImpl('rows:2', 'a:rows').shape
> mtf.MeshImpl('rows:2', 'a:rows').layout_rules
> mtf.MeshImpl('rows:2', 'a:rows').size
> mtf.MeshImpl('rows:2', 'a:rows').ndims
> mtf.MeshImpl('rows:2', 'a:rows').supports_control_dependencies
> mtf.MeshImpl('rows:2', 'a:rows').slicewise(tf.sin, 1.0)
> mtf.MeshImpl('rows:2', 'a:rows').allreduce(1.0, [0], 'SUM')
> mtf.MeshImpl('rows:2', 'a:rows').allconcat(1.0, 0, 0)
> mtf.MeshImpl('rows:2', 'a:rows').alltoall(1.0, 0, 0, 0)
> mtf.MeshImpl('rows:2', 'a:rows').receive(1.0, 0, [0, 1])
> mtf.MeshImpl('rows:2', 'a:rows').laid_out_pnum()
> mtf.MeshImpl('rows:2', 'a:rows').import_tf_tensor(x, 1.0)
> mtf.MeshImpl('rows:2', 'a:rows').export_to_tf_tensor(x, 1.0)
> mtf.MeshImpl('rows:2', 'a:rows').Print(1, [], '')
PlacementMeshImpl @ placement.PlacementMeshImpl -
> placement.PlacementMeshImpl('rows:2', 'a:rows', ['', '']).devices
> placement.PlacementMeshImpl('rows:2', 'a:rows', ['', '']).shape
> placement.PlacementMeshImpl(S([rows]), [('a', 'rows')], ('', '')).layout_rules == mtf.LayoutRules([('a', 'rows')])
> placement.PlacementMeshImpl([('rows', 2)], '', ['', '']).shape
> placement.PlacementMeshImpl('rows:2', 'a:rows', ['', '']).size
> placement.PlacementMeshImpl('', '', ['']).size
> placement.PlacementMeshImpl('rows:2', 'a', ['', ''])
> placement.PlacementMeshImpl('rows', '', ['', ''])
> placement.PlacementMeshImpl('rows:2', '', [''])
> placement.PlacementMeshImpl('rows:2', '', [])
> placement.PlacementMeshImpl(2, '', ['', ''])
> placement.PlacementMeshImpl('rows:2', 3, ['', ''])
> placement.PlacementMeshImpl('rows:2', '', ['', ''], 1, 2, 3, 4, 5)
MeshImpl.tensor_dimension_to_mesh_axis @ impl4.tensor_dimension_to_mesh_axis tensor_dimension:dim
> impl4.tensor_dimension_to_mesh_axis(c)
MeshImpl.tensor_layout @ impl4.tensor_layout arg:shape
> impl4.tensor_layout(x)
> impl4.tensor_layout(S([c, a]))
> impl4.tensor_layout(s)
MeshImpl.mesh_axis_to_cumprod @ impl4.mesh_axis_to_cumprod tensor_shape:shape
> impl4.mesh_axis_to_cumprod(S([b, c, a]))
MeshImpl.slice_shape @ impl4.slice_shape tensor_shape:shape
> impl4.slice_shape(S([a, b, c]))
> impl4.slice_shape(S([]))
> impl4.slice_shape(S([D('a', 3)]))
MeshImpl.slice_begin @ impl4.slice_begin tensor_shape:shape pnum:pnum
> impl4.slice_begin(S([a, b, c]), 3)
MeshImpl.slice_size @ impl4.slice_size tensor_shape:shape
> impl4.slice_size(S([a, b, c]))
MeshImpl.laid_out_size @ impl4.laid_out_size tensor_shape:shape
> impl4.laid_out_size(S([a, b, c]))
> impl4.laid_out_size(S([]))
MeshImpl.slicewise @ impl4.slicewise -
> impl4.slicewise(tf.negative, four)
> impl4.slicewise(tf.add, four, four)
> impl4.slicewise(tf.add, four, 1.0)
> impl4.slicewise(lambda t: (t, t), four)
> impl4.slicewise(lambda t: [t, t], four)
> impl4.slicewise(lambda: tf.constant(1.0))
> impl4.slicewise(None, four)
> impl4.slicewise(tf.add, four)
> impl4.slicewise(lambda t: None, four)
> impl4.slicewise(lambda t: 1.0, four)
> impl4.slicewise(tf.add, four, [1.0, 2.0, 3.0, 4.0])
> impl4.slicewise(tf.negative, mtf.LazyAllreduceSum(impl4, four, [0]))
MeshImpl.slicewise_delay_allreduce @ impl4.slicewise_delay_allreduce -
> impl4.slicewise_delay_allreduce(tf.negative, four)
> impl4.slicewise_delay_allreduce(tf.negative, mtf.LazyAllreduceSum(impl4, four, [0])).to_laid_out_tensor()
> impl4.slicewise_delay_allreduce(None, four)
MeshImpl.allreduce @ impl4.allreduce x:text{four} mesh_axes:axes reduction_fn_string:reduction
> impl4.allreduce(four, [0, 1], 'SUM')
> impl4.allreduce(four, [], 'SUM')
> impl4.allreduce(four, [1], 'MAX')
> impl4.allreduce(four, (0,), 'MIN')
MeshImpl.allsplit @ impl4.allsplit x:text{four} mesh_axis:axis split_axis:axis
> impl4.allsplit(four, 1, 1)
> impl4.allsplit(four, 0, 0, which=impl4.laid_out_pcoord(1))
MeshImpl.allconcat @ impl4.allconcat x:text{four} mesh_axis:axis concat_axis:axis
> impl4.allconcat(four, 1, 1)
MeshImpl.alltoall @ impl4.alltoall x:text{four} mesh_axis:axis split_axis:axis concat_axis:axis{1}
> impl4.alltoall(four, 1, 1, 0)
> impl4.alltoall(four, 0, 0, 0)
MeshImpl.receive @ impl4.receive x:text{four} mesh_axis:axis source_pcoord:axes{[1, 0]}
> impl4.receive(four, 0, [1, None])
> impl4.receive(four, 1, [None, None])
> impl4.receive(four, 0, [1])
MeshImpl.shift_by_n_processors @ impl4.shift_by_n_processors x:text{four} mesh_axis:axis offset:int wrap:bool
> impl4.shift_by_n_processors(four, 1, -1, False)
> impl4.shift_by_n_processors(four, 0, 2, True)
> impl4.shift_by_n_processors(four, 0, 0, False)
MeshImpl.laid_out_pnum @ impl4.laid_out_pnum -
> impl4.laid_out_pnum()
MeshImpl.laid_out_pcoord @ impl4.laid_out_pcoord mesh_axis:axis
> impl4.laid_out_pcoord(1)
MeshImpl.laid_out_slice_num @ impl4.laid_out_slice_num tensor_shape:shape
> impl4.laid_out_slice_num(S([a, c]))
> impl4.laid_out_slice_num(S([]))
MeshImpl.broadcast_impl @ impl4.broadcast_impl -
> impl4.broadcast_impl(impl4.slicewise(lambda: tf.constant([1.0])), S([a]), S([a, b]))
> impl4.broadcast_impl(impl4.slicewise(lambda: tf.constant([1.0])), S([a]), S([b, a]))
> impl4.broadcast_impl(impl4.slicewise(lambda: tf.constant(1.0)), S([]), S([c]))
> impl4.broadcast_impl(None, S([]), S([c]))
MeshImpl.make_slices @ impl4.make_slices -
> impl4.make_slices(tf.reshape(tf.range(8), [2, 4]), S([a, c]))
> impl4.make_slices(tf.range(3), S([b]))
> impl4.make_slices(tf.range(4), S([a]))
> impl4.make_slices(None, S([a]))
> impl4.make_slices(tf.range(2), [a])
MeshImpl.combine_slices @ impl4.combine_slices -
> impl4.combine_slices(four.tensor_list, S([a, c]))
> impl4.combine_slices(four.tensor_list, S([D('a', 4), c]))
> impl4.combine_slices(four.tensor_list, S([b, c]))
> impl4.combine_slices(four.tensor_list, S([D('q', 2), D('r', 2)]))
> impl4.combine_slices([], S([a, c]))
> impl4.combine_slices(four.tensor_list[:2], S([D('a', 4), c]))
MeshImpl.einsum @ impl4.einsum -
> impl4.einsum('ij,jk->ik', four, four)
> impl4.einsum('ij->ji', four)
> impl4.einsum('ij,j->i', four)
> impl4.einsum(None, four)
MeshImpl.Print @ impl4.Print -
> impl4.Print(four, [four], 'message')
> impl4.Print(four, [], 'message')
> impl4.Print(four, None, 'message')
MeshImpl.random @ impl4.random -
> random(impl4.random(S([a, b]), tf.random.uniform, {}))
> impl4.random(S([a, b]), tf.random.uniform, {'minval': 1.0, 'maxval': 1.0})
> impl4.random(S([a, b]), None, {})
MeshImpl.import_tf_tensor @ impl4.import_tf_tensor -
> impl4.import_tf_tensor(x, tf.ones([2, 3]))
> impl4.import_tf_tensor(s, tf.constant(2.0))
> impl4.import_tf_tensor(x, tf.ones([3, 3]))
> impl4.import_tf_tensor(None, tf.ones([2, 3]))
MeshImpl.export_to_tf_tensor @ impl4.export_to_tf_tensor -
> impl4.export_to_tf_tensor(x, impl4.import_tf_tensor(x, tf.ones([2, 3])))
> impl4.export_to_tf_tensor(x, None)
> impl4.export_to_tf_tensor(None, four)
LaidOutTensor @ impl4.LaidOutTensor -
> impl4.LaidOutTensor([tf.constant(1)] * 4).tensor_list
> impl4.LaidOutTensor([1, 2]).tensor_list
> four.slice_shape
> four.all_slices
> four.to_laid_out_tensor() is four
> impl4.LaidOutTensor.from_tensor_list([tf.constant(1)] * 4)
> impl4.LaidOutTensor(None)
> impl4.LaidOutTensor(())
LazyAllreduceSum @ mtf.LazyAllreduceSum -
> mtf.LazyAllreduceSum(impl4, four, [0]).slice_shape
> mtf.LazyAllreduceSum(impl4, four, [0]).to_laid_out_tensor()
> mtf.LazyAllreduceSum(impl4, four, [0]) + mtf.LazyAllreduceSum(impl4, four, [0])
> (mtf.LazyAllreduceSum(impl4, four, [0]) + mtf.LazyAllreduceSum(impl4, four, [0])).to_laid_out_tensor()
> mtf.LazyAllreduceSum(impl4, four, [])
> mtf.LazyAllreduceSum(impl4, None, [0]).to_laid_out_tensor()
> mtf.LazyAllreduceSum(None, four, [0]).to_laid_out_tensor()
> mtf.LazyAllreduceSum(impl4, four)
LazyLaidOutTensor @ mtf.LazyLaidOutTensor -
> mtf.LazyLaidOutTensor(lambda: four, [2, 2]).slice_shape
> mtf.LazyLaidOutTensor(lambda: four, [2, 2]).to_laid_out_tensor()
> mtf.LazyLaidOutTensor(None, [2, 2]).to_laid_out_tensor()
Lowering @ mtf.Lowering -
> mtf.Lowering(graph, {mesh: impl})
> mtf.Lowering(graph, {})
> (x, mtf.Lowering(graph, {}))
> (v, mtf.Lowering(graph, {}))
> (x, mtf.Lowering(graph, {mesh: None}))
> (x, mtf.Lowering(graph, None))
> mtf.Lowering(None, {mesh: impl})
> mtf.Lowering(x, {mesh: impl})
> (x, mtf.Lowering(graph, {'mesh': impl}))
> (x, mtf.Lowering(graph, [impl]))
> mtf.Lowering(graph, {mesh: impl}, autostack=False)
> (x, mtf.Lowering(graph, {mesh: impl}, False, None).counters)
> (v, mtf.Lowering(graph, {mesh: impl}, log_file=os.path.join(folder, 'log')))
> (v, v2, mtf.Lowering(graph, {mesh: impl}), graph.all_variables)
> (v, v2, mtf.Lowering(graph, {mesh: impl}, autostack=False), graph.all_variables)
Lowering.mesh_impl @ lowering.mesh_impl -
> lowering.mesh_impl(mesh) is impl
> lowering.mesh_impl(x) is impl
> lowering.mesh_impl(x.operation) is impl
> lowering.mesh_impl(mtf.Mesh(graph, 'm'))
> lowering.mesh_impl(None)
> lowering.mesh_impl('mesh')
Lowering.export_to_tf_tensor @ lowering.export_to_tf_tensor -
> lowering.export_to_tf_tensor(x)
> lowering.export_to_tf_tensor(x.operation)
> lowering.export_to_tf_tensor(mtf.exp(x))
> lowering.export_to_tf_tensor(None)
> lowering.export_to_tf_tensor('x')
> lowering.export_to_tf_tensor([x])
Lowering.lowered_operation @ lowering.lowered_operation -
> lowering.lowered_operation(x)
> lowering.lowered_operation(x.operation)
> lowering.lowered_operation(None)
> (mtf.assign(v, x), mtf.Lowering(graph, {mesh: impl}).lowered_operation(graph.operations[-1]))
Lowering.copy_masters_to_slices @ lowering.copy_masters_to_slices -
> lowering.copy_masters_to_slices()
> (v, lowering.copy_masters_to_slices())
> (v, lowering.copy_slices_to_masters())
> lowering.copy_slices_to_masters()
Lowering.add_counter @ lowering.add_counter -
> (lowering.add_counter('n', 2), lowering.add_counter('n', 3), dict(lowering.counters)['n'])
> (lowering.add_counter('n', 2.5), dict(lowering.counters)['n'])
> lowering.add_counter('n', 'x')
> lowering.add_counter('n', None)
> lowering.add_counter(None, 1)
Lowering.laid_out_size @ lowering.laid_out_size tensor:tensor
> lowering.laid_out_size(w)
Lowering.set_tensor_lowering @ lowering.set_tensor_lowering -
> lowering.set_tensor_lowering(x, impl.LaidOutTensor([tf.zeros([2, 3])]))
> lowering.set_tensor_lowering(x, impl.LaidOutTensor([tf.zeros([2, 2])]))
> lowering.set_tensor_lowering(x, None)
Lowering.verify_slice_shapes @ lowering.verify_slice_shapes -
> lowering.verify_slice_shapes(x, impl.LaidOutTensor([tf.zeros([2, 3])]))
> lowering.verify_slice_shapes(x, impl.LaidOutTensor([tf.zeros([3, 2])]))
> lowering.verify_slice_shapes(x, None)
> lowering.verify_slice_shapes(None, impl.LaidOutTensor([tf.zeros([3, 2])]))
Lowering.autostack @ lowering.autostack -
> lowering.autostack()
pretty_print_counters @ mtf.pretty_print_counters -
> mtf.pretty_print_counters([])
> mtf.pretty_print_counters([('a', 1.0), ('a/b', 2.0)])
> mtf.pretty_print_counters([('a', 1)])
> mtf.pretty_print_counters({'a': 1})
> mtf.pretty_print_counters(None)
> mtf.pretty_print_counters([('a',)])
log_variable_sizes @ mtf.log_variable_sizes -
> mtf.log_variable_sizes([], 'tag')
> mtf.log_variable_sizes([v], 'tag')
> mtf.log_variable_sizes([v], 'tag', verbose=False)
> mtf.log_variable_sizes([v], 'tag', mesh_to_impl={mesh: impl})
> mtf.log_variable_sizes(v, 'tag')
> mtf.log_variable_sizes(None, 'tag')
> mtf.log_variable_sizes([v], None)
> mtf.log_variable_sizes([x], 'tag')
parallel @ mtf.parallel -
> mtf.parallel(['', ''], tf.add, [1.0, 2.0], [3.0, 4.0])
> mtf.parallel(['', ''], tf.add, [1.0, 2.0], 3.0)
> mtf.parallel([''], lambda: 1)
> mtf.parallel([], lambda: 1)
> mtf.parallel(['', ''], lambda n: n, [1, 2, 3])
> mtf.parallel(['', ''], lambda n: n, n=[1, 2])
> mtf.parallel(2, lambda: 1)
> mtf.parallel(['', ''], None)
assign_slice @ mtf.assign_slice -
> mtf.assign_slice(v, tf.get_variable('t', [2]), tf.ones([2]))
> mtf.assign_slice(v, None, tf.ones([2]))
> mtf.assign_slice(v, tf.get_variable('t', [2]), None)
assign_add_slice @ mtf.assign_add_slice -
> mtf.assign_add_slice(v, tf.get_variable('t', [2]), tf.ones([3]))
> mtf.assign_add_slice(v, None, tf.ones([2]))
assign_sub_slice @ mtf.assign_sub_slice -
> mtf.assign_sub_slice(v, tf.get_variable('t', [2]), 'x')
> mtf.assign_sub_slice(v, None, tf.ones([2]))
MtfRestoreHook @ mtf.MtfRestoreHook -
> mtf.MtfRestoreHook(lowering)
> mtf.MtfRestoreHook(lowering).begin()
> mtf.MtfRestoreHook(None).begin()
> mtf.MtfRestoreHook()
MtfCheckpointSaverListener @ mtf.MtfCheckpointSaverListener -
> mtf.MtfCheckpointSaverListener(lowering)
> mtf.MtfCheckpointSaverListener(lowering).begin()
> mtf.MtfCheckpointSaverListener()
allreduce_ring @ placement.allreduce_ring -
> placement.allreduce_ring([tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])], ['', ''])
> placement.allreduce_ring([tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])], ['', ''], 'MAX')
> placement.allreduce_ring([tf.constant([1.0])], [''])
> placement.allreduce_ring([tf.constant([1.0])] * 3, [''] * 3)
> placement.allreduce_ring([], [])
> placement.allreduce_ring([tf.constant([1.0])] * 2, ['', ''], 'nope')
> placement.allreduce_ring(None, [''])
allreduce_ring_single_shard @ placement.allreduce_ring_single_shard -
> placement.allreduce_ring_single_shard([tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])], ['', ''])
> placement.allreduce_ring_single_shard([tf.constant([1.0])] * 3, [''] * 3, 'MIN')
> placement.allreduce_ring_single_shard([], [])
allconcat_ring @ placement.allconcat_ring -
> placement.allconcat_ring([tf.constant([1.0]), tf.constant([3.0])], ['', ''], 0)
> placement.allconcat_ring([tf.constant([1.0])] * 3, [''] * 3, 0)
> placement.allconcat_ring([tf.constant([1.0])] * 2, [''] * 2, 1)
> placement.allconcat_ring([], [], 0)
alltoall_pointtwise @ placement.alltoall_pointtwise -
> placement.alltoall_pointtwise([tf.constant([[1.0, 2.0]]), tf.constant([[3.0, 4.0]])], ['', ''], 1, 0)
> placement.alltoall_pointtwise([tf.constant([1.0])] * 2, ['', ''], 0, 0)
> placement.alltoall_pointtwise([], [], 0, 0)
alltoall_ring @ placement.alltoall_ring -
> placement.alltoall_ring([tf.constant([[1.0, 2.0]]), tf.constant([[3.0, 4.0]])], ['', ''], 1, 0)
> placement.alltoall_ring([tf.constant([[1.0, 2.0, 3.0]])] * 3, [''] * 3, 1, 0)
> placement.alltoall_ring([], [], 0, 0)
HierarchicalTiling @ simd.HierarchicalTiling -
> simd.HierarchicalTiling([('rows', 2)], 'x')
> simd.HierarchicalTiling.spec_to_mesh_shape([('rows', (2, 2, 1)), ('cols', (1, 1, 1))], 4)
> simd.HierarchicalTiling.spec_to_mesh_shape(None, 4)
auto_logical_to_physical_tpu @ simd.auto_logical_to_physical_tpu -
> simd.auto_logical_to_physical_tpu([4, 4], [2, 2, 2, 2])
> simd.auto_logical_to_physical_tpu([2, 2], [2, 2, 1])
> simd.auto_logical_to_physical_tpu([2, 2], [2, 1, 2])
> simd.auto_logical_to_physical_tpu([8], [2, 2, 2])
> simd.auto_logical_to_physical_tpu([2], [2, 2, 2])
> simd.auto_logical_to_physical_tpu('4', [2, 2, 1])
> simd.auto_logical_to_physical_tpu(None, [2, 2, 1])
physical_shape_3d_from_topology_proto_4d @ simd.physical_shape_3d_from_topology_proto_4d -
> simd.physical_shape_3d_from_topology_proto_4d([4, 4, 1, 2])
> simd.physical_shape_3d_from_topology_proto_4d([4, 4, 2])
> simd.physical_shape_3d_from_topology_proto_4d((2, 2, 1, 2))
> simd.physical_shape_3d_from_topology_proto_4d([2, 2])
> simd.physical_shape_3d_from_topology_proto_4d(None)
> simd.physical_shape_3d_from_topology_proto_4d('2222')
BalancedVariablePlacer @ mtf_utils.BalancedVariablePlacer -
> mtf_utils.BalancedVariablePlacer(['a', 'b'])
> mtf_utils.BalancedVariablePlacer(['a', 'b'], [1, 0]).device_function(tf.get_variable('t', [2]).op)
> [mtf_utils.BalancedVariablePlacer(['a', 'b']).device_function(tf.get_variable('t', [2]).op)]
> mtf_utils.BalancedVariablePlacer(['a', 'b']).device_function(None)
> mtf_utils.BalancedVariablePlacer(['a'], [1, 2, 3]).device_function(tf.get_variable('t', [2]).op)
> mtf_utils.BalancedVariablePlacer(None)
> mtf_utils.BalancedVariablePlacer([])
create_host_call @ mtf_utils.create_host_call -
> mtf_utils.create_host_call(folder)
> mtf_utils.create_host_call(None)
> (tf.add_to_collection('tpu_summaries', ('s', 'n', tf.constant(1.0))), mtf_utils.remove_summaries())
remove_summaries @ mtf_utils.remove_summaries -
> mtf_utils.remove_summaries()
> mtf_utils.remove_summaries(1)
outside_all_rewrites @ mtf_utils.outside_all_rewrites -
> mtf_utils.outside_all_rewrites(1)
topology_rank @ mtf_utils.topology_rank -
> mtf_utils.topology_rank(None)
NumpyConverter @ test_utils.NumpyConverter -
> test_utils.NumpyConverter().convert_np_array_to_mtf_tensor(np.array([1, 2]), ['n'])
> test_utils.NumpyConverter().convert_np_array_to_mtf_tensor(np.array([1.5, 2.0]), ['n'], tf.float32)
> test_utils.NumpyConverter().convert_np_array_to_mtf_tensor(np.array([1, 2]))
> test_utils.NumpyConverter().convert_np_array_to_mtf_tensor(np.zeros([2, 3], 'int32'), ['n', 'm'])
> test_utils.NumpyConverter().convert_np_array_to_mtf_tensor(np.zeros([2, 3], 'int32'), ['n'])
> test_utils.NumpyConverter().convert_np_array_to_mtf_tensor([1, 2], ['n'])
> test_utils.NumpyConverter().convert_np_array_to_mtf_tensor(None, ['n'])
> test_utils.NumpyConverter().convert_np_array_to_mtf_tensor(np.array([1, 2]), 'n')
ReplicatedVariable @ tpu_variables.ReplicatedVariable -
> tpu_variables.ReplicatedVariable('n', [tf.get_variable('t', [2], use_resource=True)]).shape
> tpu_variables.ReplicatedVariable('n', [tf.get_variable('t', [2], use_resource=True)]).dtype
> tpu_variables.ReplicatedVariable('n', [tf.get_variable('t', [2], use_resource=True)]).name
> tpu_variables.ReplicatedVariable('n', [tf.get_variable('t', [2], use_resource=True)]).get_shape()
> tpu_variables.ReplicatedVariable('n', [])
> tpu_variables.ReplicatedVariable('n', None)
"""
