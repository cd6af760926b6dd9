"""Calls of dimensions, shapes, layouts, graphs, meshes, tensors and variables."""

CORE = """
Dimension @ mtf.Dimension name:new_name size:size
> D('a', 2)[0]
> D('a', 2).size
> D('a', 2) == ('a', 2)
> D(name='a', size=2)._replace(size=5)
> D('a')
> mtf.Dimension(size=2)
convert_to_dimension @ mtf.convert_to_dimension -
> mtf.convert_to_dimension(['a', 2])
> mtf.convert_to_dimension(('a', 2))
> mtf.convert_to_dimension(('a', 2.0))
> mtf.convert_to_dimension(('a', np.int64(2)))
> mtf.convert_to_dimension(('a', True))
> mtf.convert_to_dimension(('a', 2, 3))
> mtf.convert_to_dimension(('a',))
> mtf.convert_to_dimension(5)
> mtf.convert_to_dimension('a')
> mtf.convert_to_dimension('ab')
> mtf.convert_to_dimension('a:2')
> mtf.convert_to_dimension(None)
> mtf.convert_to_dimension((2, 'a'))
> mtf.convert_to_dimension(a)
> mtf.convert_to_dimension({'a': 2})
> mtf.convert_to_dimension({'a', 2})
> mtf.convert_to_dimension([])
> mtf.convert_to_dimension(np.array([1, 2]))
> mtf.convert_to_dimension(S([a, b]))
> mtf.convert_to_dimension(b'ab')
> mtf.convert_to_dimension(2.5)
convert_to_shape @ mtf.convert_to_shape -
> mtf.convert_to_shape('a:2,b:3')
> mtf.convert_to_shape('a:2;b:3')
> mtf.convert_to_shape('a:2 b:3')
> mtf.convert_to_shape('a:2.b:3')
> mtf.convert_to_shape(' a:2, ')
> mtf.convert_to_shape('')
> mtf.convert_to_shape('a:2,b')
> mtf.convert_to_shape('a:2:3')
> mtf.convert_to_shape('a=2')
> mtf.convert_to_shape('a:')
> mtf.convert_to_shape(':2')
> mtf.convert_to_shape('a:-2')
> mtf.convert_to_shape('a:1.5')
> mtf.convert_to_shape('a:2,a:2')
> mtf.convert_to_shape([('a', 2), b])
> mtf.convert_to_shape((a, b))
> mtf.convert_to_shape(iter([a, b]))
> mtf.convert_to_shape({a: 1})
> mtf.convert_to_shape(a)
> mtf.convert_to_shape(5)
> mtf.convert_to_shape([5])
> mtf.convert_to_shape(None)
> mtf.convert_to_shape([None])
> mtf.convert_to_shape(['a:2'])
> mtf.convert_to_shape([['a', 2]])
> mtf.convert_to_shape(('a', 2))
> mtf.convert_to_shape(np.array([2, 3]))
> mtf.convert_to_shape(b'a:2')
Shape @ mtf.Shape dims:shape{[a, b]}
> S([a, ('b', 3)])
> S([['a', 2]])
> S(dims=(a,))
> S('a:2')
> S(None)
> S([a, None])
> S([a, a])
> S([a, D('a', 3)])
> S(S([a, b]))
> S(d for d in [a, b])
> S()
Shape.dims @ mtf.Shape -
> S([a, b]).dims
> S(()).dims
> S([a]).dims.append(b)
Shape.ndims -
> S([a, b]).ndims
> S([]).ndims
Shape.to_integer_list -
> S([a, b]).to_integer_list
> S([]).to_integer_list
Shape.size -
> S([a, b]).size
> S([]).size
> S([D('z', 0), b]).size
Shape.to_string -
> S([a, b]).to_string
> S([]).to_string
> repr(S([a]))
> str(S([a, D('with space', 3)]))
Shape.cumprod -
> S([a, b, c]).cumprod
> S([]).cumprod
Shape.cumprod_to_tensor_axis @ S([a,b,c]).cumprod_to_tensor_axis cumprod:int{2}
> S([a, b, c]).cumprod_to_tensor_axis(4)
> S([a, b, c]).cumprod_to_tensor_axis(12)
> S([D('o', 1), a]).cumprod_to_tensor_axis(1)
Shape.dimension_names -
> S([a, b]).dimension_names
> S([]).dimension_names
Shape.rename_dimension @ S([a,b]).rename_dimension old_name:dim_name new_name:new_name
> S([a, b]).rename_dimension('a', 'b')
> S([a, b]).rename_dimension('zz', 'b')
> S([a, b]).rename_dimension(a, 'b')
Shape.resize_dimension @ S([a,b]).resize_dimension name:dim_name new_size:size
> S([a, b]).resize_dimension('zz', 3)
> S([a, b]).resize_dimension('a', 0)
Shape.get_dim_by_name @ S([a,b]).get_dim_by_name name:dim_name
Shape.__add__ -
> S([a]) + b
> S([a]) + [b]
> S([a]) + S([b, c])
> S([a]) + (b,)
> S([a]) + []
> S([a]) + a
> S([a]) + 'b:3'
> S([a]) + None
> S([a]) + 3
> [b] + S([a])
> S([a]) + [('b', 3)]
> S([a]) + [['b', 3]]
> b + S([a])
Shape.__sub__ -
> S([a, b]) - a
> S([a, b]) - [a]
> S([a, b]) - (a,)
> S([a, b]) - S([b])
> S([a, b]) - c
> S([a, b]) - [c]
> S([a, b]) - 'a'
> S([a, b]) - None
> S([a, b]) - 3
> S([a, b]) - {a}
> S([a, b]) - ['a']
Shape.__eq__ -
> S([a, b]) == [a, b]
> S([a, b]) == S([a, b])
> S([a, b]) != S([b, a])
> S([a]) == 'a:2'
> S([a]) == None
> S([]) == S([])
> S([a]) != None
> hash(S([a]))
> len({S([a]): 1})
Shape.__getitem__ -
> S([a, b])[0]
> S([a, b])[-1]
> S([a, b])[0:1]
> S([a, b])[5]
> S([a, b])['a']
> S([a, b])[a]
Shape.__iter__ -
> list(S([a, b]))
> a in S([a, b])
> c in S([a, b])
> 'a' in S([a, b])
> len(S([a, b]))
> bool(S([]))
> list(reversed(S([a, b])))
> set(S([a, b]))
> np.array(S([a, b]).to_integer_list)
> sorted(S([b, a]))
list_product @ mtf.list_product -
> mtf.list_product([])
> mtf.list_product([2, 3])
> mtf.list_product((2.5, 2))
> mtf.list_product(n for n in [2, 3])
> mtf.list_product(3)
> mtf.list_product('ab')
> mtf.list_product(None)
> mtf.list_product(['a', 2])
> mtf.list_product(np.array([2, 3]))
transpose_list_of_lists @ mtf.transpose_list_of_lists -
> mtf.transpose_list_of_lists([[1, 2], [3, 4]])
> mtf.transpose_list_of_lists(((1, 2), (3, 4)))
> mtf.transpose_list_of_lists([[1, 2], [3]])
> mtf.transpose_list_of_lists([[]])
> mtf.transpose_list_of_lists([])
> mtf.transpose_list_of_lists(['ab', 'cd'])
> mtf.transpose_list_of_lists(None)
> mtf.transpose_list_of_lists([1])
combined_dimension @ mtf.combined_dimension dims:dims{[a, b]} name=name
> mtf.combined_dimension([])
> mtf.combined_dimension([], 'n')
> mtf.combined_dimension(S([a, b]))
> mtf.combined_dimension(a)
anonymous_shape @ mtf.anonymous_shape shape:shape
is_subsequence @ mtf.is_subsequence -
> mtf.is_subsequence([1, 2], [1, 3, 2])
> mtf.is_subsequence([2, 1], [1, 3, 2])
> mtf.is_subsequence([], [])
> mtf.is_subsequence([1], [])
> mtf.is_subsequence('ac', 'abc')
> mtf.is_subsequence(S([a]), S([a, b]))
> mtf.is_subsequence([1, 1], [1])
> mtf.is_subsequence(None, [1])
> mtf.is_subsequence([1], None)
> mtf.is_subsequence(1, [1])
verify_no_new_dims @ mtf.verify_no_new_dims -
> mtf.verify_no_new_dims([S([a, b])], S([a]))
> mtf.verify_no_new_dims([S([a])], S([a, b]))
> mtf.verify_no_new_dims([], S([]))
> mtf.verify_no_new_dims([S([a]), S([b])], S([b, a]))
> mtf.verify_no_new_dims([[a]], [a])
> mtf.verify_no_new_dims(S([a]), S([a]))
> mtf.verify_no_new_dims(None, S([a]))
LayoutRules @ mtf.LayoutRules -
> mtf.LayoutRules([('a', 'rows')])
> mtf.LayoutRules({('a', 'rows'), ('b', 'cols')})
> mtf.LayoutRules([])
> mtf.LayoutRules('a:rows')
> mtf.LayoutRules([('a', 'rows', 'cols')])
> mtf.LayoutRules(None)
> mtf.LayoutRules([('a', 3)])
> mtf.LayoutRules([a])
> mtf.LayoutRules(3)
LayoutRules.tensor_dimension_to_mesh_axis @ mtf.LayoutRules([('a','rows')]).tensor_dimension_to_mesh_axis tensor_dimension:dim mesh_shape:mesh_shape
> mtf.LayoutRules([('a', 'rows'), ('a', 'cols')]).tensor_dimension_to_mesh_axis(a, S([rows, cols]))
> mtf.LayoutRules([('a', 'rows')]).tensor_dimension_to_mesh_axis(a, S([cols]))
> mtf.LayoutRules([('a', 'cols')]).tensor_dimension_to_mesh_axis(a, S([rows, cols]))
LayoutRules.tensor_layout @ mtf.LayoutRules([('a','rows')]).tensor_layout tensor_shape:shape mesh_shape:mesh_shape
> mtf.LayoutRules([('a', 'rows'), ('b', 'rows')]).tensor_layout(S([a, b]), S([rows]))
> mtf.LayoutRules([('b', 'rows')]).tensor_layout(S([a, b]), S([rows]))
> mtf.LayoutRules([('a', 'rows'), ('c', 'cols')]).tensor_layout(S([c, b, a]), S([rows, cols]))
LayoutRules.mesh_dimension_name_to_tensor_dimension_names @ mtf.LayoutRules([('a','rows')]).mesh_dimension_name_to_tensor_dimension_names mesh_dimension_name:dim_name{'rows'}
> sorted(mtf.LayoutRules([('a','rows'),('b','rows')]).mesh_dimension_name_to_tensor_dimension_names('rows'))
LayoutRules.__eq__ -
> mtf.LayoutRules([('a', 'rows')]) == mtf.LayoutRules([('a', 'rows')])
> mtf.LayoutRules([('a', 'rows')]) != mtf.LayoutRules([('a', 'rows')])
> mtf.LayoutRules([('a', 'rows')]) == 'a:rows'
> repr(mtf.LayoutRules([('a', 'rows')]))
convert_to_layout_rules @ mtf.convert_to_layout_rules x:layout
> mtf.convert_to_layout_rules(None)
> mtf.convert_to_layout_rules('a:rows;b:cols')
> mtf.convert_to_layout_rules(' a:rows b:cols ')
> mtf.convert_to_layout_rules('a:')
> mtf.convert_to_layout_rules({'a': 'rows'})
> mtf.convert_to_layout_rules([['a', 'rows']])
> mtf.convert_to_layout_rules(b'a:rows')
TensorLayout @ mtf.TensorLayout -
> mtf.TensorLayout([0, None])
> mtf.TensorLayout((None, 1))
> mtf.TensorLayout([])
> mtf.TensorLayout('ab')
> mtf.TensorLayout(None)
> mtf.TensorLayout(3)
> mtf.TensorLayout([0, None]).tensor_axis_to_mesh_axis
> mtf.TensorLayout([0, None]) == mtf.TensorLayout((0, None))
> mtf.TensorLayout([0, None]) == [0, None]
> mtf.TensorLayout([0]) != mtf.TensorLayout([1])
> repr(mtf.TensorLayout([0, None]))
> len(mtf.TensorLayout([0, None]))
> list(mtf.TensorLayout([0, None]))
> mtf.TensorLayout([0, None])[1]
> mtf.TensorLayout([0, None])[5]
> mtf.TensorLayout([None, None]).is_fully_replicated
> mtf.TensorLayout([0, None]).is_fully_replicated
TensorLayout.mesh_axis_to_tensor_axis @ mtf.TensorLayout([1,None,0]).mesh_axis_to_tensor_axis mesh_ndims:int{2}
tensor_dim_to_mesh_dim_size @ mtf.tensor_dim_to_mesh_dim_size layout:layout mesh_shape:mesh_shape tensor_dim:dim
tensor_dim_to_size_per_split @ mtf.tensor_dim_to_size_per_split layout:layout mesh_shape:mesh_shape tensor_dim:dim
> mtf.tensor_dim_to_size_per_split('b:rows', 'rows:2', b)
VariableDType @ mtf.VariableDType master_dtype=dtype slice_dtype=dtype activation_dtype=dtype
> mtf.VariableDType()
> mtf.VariableDType(tf.bfloat16)
> mtf.VariableDType(tf.bfloat16, None, tf.float32)
> mtf.VariableDType(master_dtype=None)
Graph @ mtf.Graph -
> mtf.Graph()
> mtf.Graph('g')
> repr(mtf.Graph())
> mtf.Graph().operations
> mtf.Graph().all_variables
> mtf.Graph().trainable_variables
> (w, graph.all_variables)
> (x, [type(op).__name__ for op in graph.operations])
> mtf.Graph().to_string
Graph.unique_name @ graph.unique_name name:new_name mark_as_used=bool
> [graph.unique_name('n') for _ in range(3)]
> [graph.unique_name('n', False) for _ in range(3)]
> [graph.unique_name('n'), graph.unique_name('n_1'), graph.unique_name('n')]
> [graph.unique_name('N'), graph.unique_name('n')]
> graph.unique_name('')
Graph.make_variables_untrainable @ graph.make_variables_untrainable -
> (graph.make_variables_untrainable([v]), v.trainable, graph.trainable_variables)
> (graph.make_variables_untrainable([]), v.trainable)
> graph.make_variables_untrainable([x])
> graph.make_variables_untrainable([w])
> graph.make_variables_untrainable(v)
> graph.make_variables_untrainable(None)
Graph.combine_assignments @ graph.combine_assignments -
> graph.combine_assignments([])
> graph.combine_assignments([mtf.assign(v, x)])
> graph.combine_assignments(None)
> graph.combine_assignments([x])
Graph.capture_operations @ graph.capture_operations fn:fn
> graph.capture_operations(lambda: x + 1.0)
> graph.capture_operations(lambda: None)
> graph.capture_operations(lambda: (mtf.exp(x), 2))
Graph.clone_operations @ graph.clone_operations -
> graph.clone_operations([], {})
> graph.clone_operations([mtf.exp(x).operation], {x: x})
> graph.clone_operations([mtf.exp(x).operation], {})
> graph.clone_operations(None, {})
> graph.clone_operations([v], {})
Graph.rewrite_stack_variables @ graph.rewrite_stack_variables -
> (v, v2, graph.rewrite_stack_variables(), graph.all_variables)
> (v, v2, graph.rewrite_stack_variables(0), graph.all_variables)
> (v, v2, graph.rewrite_stack_variables(max_combined_slice_size='1'))
> graph.rewrite_stack_variables(mesh_to_impl={})
Mesh @ mtf.Mesh graph:mesh{graph} name:name variable_placer=none
> mtf.Mesh(graph, 'm').graph is graph
> mtf.Mesh(graph)
> mtf.Mesh('g', 'm')
> mtf.Mesh(graph, 'm').variable_placer_fn
> mtf.Mesh(None, 'm')
Tensor @ mtf.Tensor -
> x.shape
> x.size
> x.dtype
> x.name
> x.to_string
> x.mesh is mesh
> x.graph is graph
> x.operation
> repr(s)
> len(x)
> list(x)
> bool(x)
> float(s)
> x[0]
> x.get_shape()
> x.eval()
> x.numpy()
> {x: 1}[x]
> x in [x]
> x == x
> x == y
> x != y
> x < y
> x > 1.0
> x @ y
> x ** 2
> abs(x)
> round(x)
> ~bools
> bools & bools
> bools | bools
> +x
> -x
> mtf.Tensor(x.operation, x.shape, tf.float32)
> mtf.Tensor(x.operation, [a], tf.float32)
> mtf.Tensor(x.operation, None, tf.float32)
> mtf.Tensor(x.operation, S([a]), None)
> mtf.Tensor(x.operation, S([a]), 'float32')
> mtf.Tensor(None, S([a]), tf.float32)
Tensor.__add__ -
> x + x
> x + row
> x + y
> x + 1
> x + 1.5
> x + True
> x + np.float32(1.5)
> x + np.int64(2)
> x + None
> x + '1'
> x + [1.0]
> x + ints
> ints + 1
> ints + ints
> bools + bools
> ints + 1.5
> x + half
> x + s
> s + s
> 1 + x
> 1.5 + x
> np.float32(1.5) + s
> None + x
> sum([x, x])
> sum([])+x
Tensor.__sub__ -
> x - row
> x - 1
> 1 - x
> x - x
> x - '1'
> ints - 1
> 1.5 - ints
> bools - bools
> np.float64(1) - s
Tensor.__mul__ -
> x * row
> x * y
> x * 2
> 2 * x
> x * 0
> x * 1
> x * True
> x * None
> ints * 2
> ints * 0.5
> ints * x
> bools * x
> [1] * x
> 's' * x
Tensor.__truediv__ -
> x / 2
> x / 2.0
> 2.0 / (x + 10.0)
> x / (x + 10.0)
> x / row
> ints / 2
> ints / ints
> x / 0
> x / 0.0
> x / None
> x / 'a'
> 1 / ints
Tensor.__floordiv__ -
> x // 2
> x // 2.0
> ints // 2
> ints // 2.0
> 7 // (ints + 1)
> 7.0 // (x + 10.0)
> x // x.shape
> x // None
> bools // 2
Tensor.__mod__ -
> x % 2
> x % 2.0
> ints % 2
> 7 % (ints + 1)
> 7.0 % (x + 10.0)
> x % None
> x % (x + 10.0)
Tensor.__neg__ -
> -ints
> -bools
> -s
> -half
Operation @ mtf.Operation -
> mtf.Operation([x])
> mtf.Operation([x], name='named').name
> mtf.Operation([x], name='named').inputs
> mtf.Operation([x]).outputs
> mtf.Operation([], mesh=mesh).mesh is mesh
> mtf.Operation([])
> mtf.Operation(None)
> mtf.Operation([x], name=3)
> mtf.Operation([x], mesh)
> mtf.Operation([x, None])
> mtf.Operation([x]).has_gradient
> mtf.Operation([x]).graph is graph
> mtf.Operation([x]).lower(None)
> mtf.Operation([x]).gradient([x])
> mtf.Operation([x]).splittable_dims
> mtf.exp(x).operation.to_string
> x.operation.name
> x.operation.inputs
> x.operation.has_gradient
> mtf.stop_gradient(x).operation.has_gradient
> mtf.exp(x).operation.splittable_dims
> mtf.exp(x).operation.unsplittable_dims
> mtf.concat([x, x], 'a').operation.splittable_dims
> mtf.concat([x, x], 'a').operation.unsplittable_dims
get_variable @ mtf.get_variable mesh:mesh name:new_name shape:shape *dtype=dtype *master_dtype=dtype slice_dtype=dtype activation_dtype=dtype initializer=initializer trainable=bool
> mtf.get_variable(mesh, 'n', S([a]), tf.float32)
> mtf.get_variable(mesh, 'n', S([a]), dtype=vdtype)
> mtf.get_variable(mesh, 'n', S([a]), tf.int32, initializer=tf.zeros_initializer()).operation.trainable
> mtf.get_variable(mesh, 'n', S([a]), trainable=False).operation.trainable
> mtf.get_variable(mesh, 'n', S([]))
> mtf.get_variable(mesh, 'n', S([a]), dtype=tf.bfloat16)
> mtf.get_variable(mesh, 'n', S([a]), use_resource=True)
> mtf.get_variable(mesh, 'n', S([a]), collections=[])
> mtf.get_variable(mesh, 'n', S([a]), unknown=True)
> mtf.get_variable(mesh, 'a b', S([a]))
> mtf.get_variable(mesh, '', S([a]))
> [mtf.get_variable(mesh, 'n', S([a])) is mtf.get_variable(mesh, 'n', S([a]))]
Variable @ mtf.Variable -
> mtf.Variable(mesh, 'n', S([a]), vdtype, tf.ones_initializer(), True).outputs[0]
> mtf.Variable(mesh, 'n', S([a]), tf.float32, tf.ones_initializer(), True)
> mtf.Variable(mesh, 'n', 'a:2', vdtype, tf.ones_initializer(), True)
> mtf.Variable(mesh, 'n', S([a]), vdtype, None, True).outputs[0]
> v.shape
> v.size
> v.dtype
> v.master_dtype
> v.slice_dtype
> v.activation_dtype
> v.trainable
> v.value
> v.name
> v.outputs
> v.get_master()
> v.assign_to_master(tf.zeros([2, 3]))
> v.master_device
> repr(v)
> v.to_string
> v.splittable_dims
> v.unsplittable_dims
read_variable @ mtf.read_variable var:variable
> mtf.read_variable(x)
"""
