"""Calls of functions that make operations."""

ELEMENTWISE = """
add @ mtf.add x1:tensor x2:operand output_shape=shape_or_none name=name
> mtf.add(1.0, x)
> mtf.add(1.0, 2.0)
> mtf.add(x, row, S([b, a]))
> mtf.add(x, row, output_shape='b:3,a:2')
> mtf.add(x, x, name='named')
sub @ mtf.sub x1:tensor x2:operand output_shape=shape_or_none name=name
> mtf.sub(1.0, x)
> mtf.sub(x, x, output_shape=S([a]))
multiply @ mtf.multiply x1:tensor x2:operand output_shape=shape_or_none name=name
> mtf.multiply(2, x)
> mtf.multiply(x, y, output_shape=[a, b, c])
divide @ mtf.divide x1:tensor x2:operand output_shape=shape_or_none name=name
> mtf.divide(1.0, x + 10.0)
> mtf.divide(ints, ints + 1)
floordiv @ mtf.floordiv x1:tensor x2:operand{2.0} output_shape=shape_or_none{x.shape}
> mtf.floordiv(7, ints + 1)
mod @ mtf.mod x1:tensor x2:operand{2.0} output_shape=shape_or_none{x.shape}
> mtf.mod(7, ints + 1)
maximum @ mtf.maximum x1:tensor x2:operand output_shape=shape_or_none name=name
> mtf.maximum(0.0, x)
> mtf.maximum(0, x)
> mtf.maximum(x, 0, S([b, a]))
minimum @ mtf.minimum x1:tensor x2:operand output_shape=shape_or_none name=name
> mtf.minimum(0.0, x)
> mtf.minimum(ints, 1)
less @ mtf.less x1:tensor x2:operand output_shape=shape_or_none
> mtf.less(0, x)
> mtf.less(x, x, 'named')
greater @ mtf.greater x1:tensor x2:operand output_shape=shape_or_none
less_equal @ mtf.less_equal x1:tensor x2:operand output_shape=shape_or_none
greater_equal @ mtf.greater_equal x1:tensor x2:operand output_shape=shape_or_none
equal @ mtf.equal x1:tensor x2:operand output_shape=shape_or_none
> mtf.equal(ints, 1)
> mtf.equal(ints, 1.0)
> mtf.equal(bools, True)
not_equal @ mtf.not_equal x1:tensor x2:operand output_shape=shape_or_none
> mtf.not_equal(ints, 1)
logical_and @ mtf.logical_and x1:bools x2:bools output_shape=shape{x.shape}
> mtf.logical_and(bools, True)
> mtf.logical_and(bools, 1)
logical_or @ mtf.logical_or x1:bools x2:bools output_shape=shape{x.shape}
> mtf.logical_or(False, bools)
logical_not @ mtf.logical_not x:bools name=name
mtf_pow @ mtf.pow x:tensor{(x + 3.0)} y:operand{2.0}
> mtf.pow(2.0, x)
> mtf.pow(x + 3.0, 2)
> mtf.pow(ints, 2)
> mtf.mtf_pow(x + 3.0, x)
mtf_abs @ mtf.abs x:tensor
> mtf.mtf_abs(ints)
exp @ mtf.exp x:tensor name=name
log @ mtf.log x:tensor{(x + 3.0)} name=name
sin @ mtf.sin x:tensor name=name
cos @ mtf.cos x:tensor name=name
sqrt @ mtf.sqrt x:tensor{(x + 3.0)} name=name
rsqrt @ mtf.rsqrt x:tensor{(x + 3.0)} name=name
square @ mtf.square x:tensor name=name
sign @ mtf.sign x:tensor name=name
negative @ mtf.negative x:tensor name=name
reciprocal @ mtf.reciprocal x:tensor{(x + 3.0)} name=name
sigmoid @ mtf.sigmoid x:tensor name=name
tanh @ mtf.tanh x:tensor name=name
relu @ mtf.relu x:tensor name=name
leaky_relu @ mtf.leaky_relu x:tensor *alpha=number name=name
gelu @ mtf.gelu x:tensor
elu @ mtf.elu x:tensor
selu @ mtf.selu x:tensor
softplus @ mtf.softplus x:tensor
swish @ mtf.swish x:tensor
squared_relu @ mtf.squared_relu x:tensor
identity @ mtf.identity x:tensor name=name
stop_gradient @ mtf.stop_gradient x:tensor
cast @ mtf.cast x:tensor dtype:dtype name=name
> mtf.cast(x, 'int32')
> mtf.cast(x, np.int32)
> mtf.cast(x, tf.float32) is x
> mtf.cast(bools, tf.float32)
> mtf.cast(ints, tf.bool)
to_float @ mtf.to_float x:tensor name=name
> mtf.to_float(bools)
> mtf.to_float(x) is x
to_int32 @ mtf.to_int32 x:tensor name=name
to_bfloat16 @ mtf.to_bfloat16 x:tensor name=name
cwise @ mtf.cwise tf_fn:fn xs:tensors{[x]} output_dtype=dtype name=name
> mtf.cwise(tf.add, [x, x])
> mtf.cwise(tf.add, [x, row])
> mtf.cwise(lambda t: t > 0, [x], tf.bool)
> mtf.cwise(tf.add, x, x)
slicewise @ mtf.slicewise tf_fn:fn xs:tensors{[x]} *output_shape=shape{[a,b]} *output_dtype=dtype splittable_dims=dims name=name
> mtf.slicewise(lambda t: tf.reduce_sum(t, 0), [x], output_shape=S([b]))
> mtf.slicewise(lambda t: (t, t), [x], output_shape=[S([a, b]), S([a, b])])
> mtf.slicewise(lambda t: (t, tf.cast(t, tf.int32)), [x], output_shape=[S([a, b]), S([a, b])], output_dtype=[tf.float32, tf.int32])
binary_op_with_broadcasting @ mtf.binary_op_with_broadcasting tf_fn:fn{tf.add} x1:tensor x2:operand output_shape=shape_or_none output_dtype=dtype
binary_arguments_to_tensors @ mtf.binary_arguments_to_tensors x1:tensor x2:operand
> mtf.binary_arguments_to_tensors(2, x)
> mtf.binary_arguments_to_tensors(2, 3)
where @ mtf.where condition:bools if_true:tensor if_false:operand{x} output_shape=shape{x.shape}
> mtf.where(bools, 1.0, x)
> mtf.where(bools, x, 0)
> mtf.where(bools, 1.0, 0.0)
> mtf.where(mtf.to_float(bools), x, x * 2)
> mtf.where(bools, x, row)
> mtf.where(True, x, x)
> mtf.where(bools, ints, ints + 1)
> mtf.where(bools, None, x)
add_n @ mtf.add_n xs:tensors
> mtf.add_n([x])
> mtf.add_n([x, row])
> mtf.add_n((x, x, x))
> mtf.add_n([x, 1.0])
dropout @ mtf.dropout x:tensor is_training:bool{False} *keep_prob=number rate=number noise_shape=shape name=name
> mtf.dropout(x, True, 1.0)
> mtf.dropout(x, True, rate=0.0)
> mtf.dropout(x, True, rate=0)
> random(mtf.dropout(x, True, 0.5))
> random(mtf.dropout(x, True, rate=0.5, noise_shape=[a]))
> mtf.dropout(x, True)
> mtf.dropout(x, True, rate=2.0)
> mtf.dropout(x, True, rate=-0.5)
> mtf.dropout(x, False, rate=0.5) is x
> mtf.dropout(x, 0, rate=0.5)
random_uniform @ mtf.random_uniform -
> random(mtf.random_uniform(mesh, S([a, b])))
> random(mtf.random_uniform(mesh, [a, b], minval=1.0, maxval=2.0))
> random(mtf.random_uniform(mesh, 'a:2', dtype=tf.float32))
> mtf.random_uniform(mesh, S([a]), minval=1.0, maxval=1.0)
> mtf.random_uniform(mesh, S([a]), unknown=3)
> mtf.random_uniform(mesh, a)
> mtf.random_uniform(None, S([a]))
> random(mtf.random_uniform(mesh, S([a]), maxval=10, dtype=tf.int32))
random_normal @ mtf.random_normal -
> random(mtf.random_normal(mesh, S([a, b])))
> random(mtf.random_normal(mesh, [a, b], mean=1.0, stddev=2.0))
> mtf.random_normal(mesh, S([a]), mean=1.0, stddev=0.0)
> random(mtf.random_normal(mesh, S([a]), dtype=tf.bfloat16))
> mtf.random_normal(mesh, S([a]), minval=3)
> mtf.random_normal(mesh, 'a')
sample_with_temperature @ mtf.sample_with_temperature -
> mtf.sample_with_temperature(x, b, 0.0)
> mtf.sample_with_temperature(x, b, temperature=0)
> random(mtf.sample_with_temperature(x, b))
> random(mtf.sample_with_temperature(x, a, 0.5, name='named'))
> mtf.sample_with_temperature(x, c)
> mtf.sample_with_temperature(x, 'b')
> mtf.sample_with_temperature(x, b, '1')
> mtf.sample_with_temperature(ints, a, 0.0)
constant @ mtf.constant mesh:mesh value:number *shape=shape *dtype=dtype
> mtf.constant(mesh, 1, dtype=tf.int32)
> mtf.constant(mesh, True, dtype=tf.bool)
> mtf.constant(mesh, 1.5, S([a]), tf.int32)
> mtf.constant(mesh, 3)
zeros @ mtf.zeros mesh:mesh shape:shape *dtype=dtype
ones @ mtf.ones mesh:mesh shape:shape *dtype=dtype
> mtf.ones(mesh, S([a]), tf.bool)
zeros_like @ mtf.zeros_like t:tensor
> mtf.zeros_like(ints)
> mtf.zeros_like(bools)
ones_like @ mtf.ones_like t:tensor
> mtf.ones_like(ints)
mtf_range @ mtf.range mesh:mesh dim:dim dtype:dtype name=name
> mtf.mtf_range(mesh, a, tf.int32)
> mtf.mtf_range(mesh, a)
import_tf_tensor @ mtf.import_tf_tensor -
> mtf.import_tf_tensor(mesh, tf.zeros([2, 3]), S([a, b]))
> mtf.import_tf_tensor(mesh, tf.zeros([2, 3]), [a, b])
> mtf.import_tf_tensor(mesh, tf.zeros([2, 3]), 'a:2,b:3')
> mtf.import_tf_tensor(mesh, tf.zeros([2, 3]))
> mtf.import_tf_tensor(mesh, np.zeros([2, 3], 'float32'), S([a, b]))
> mtf.import_tf_tensor(mesh, np.zeros([2, 3]), S([a, b]))
> mtf.import_tf_tensor(mesh, [[1, 2, 3], [4, 5, 6]], S([a, b]))
> mtf.import_tf_tensor(mesh, 3.0, S([]))
> mtf.import_tf_tensor(mesh, 3, [])
> mtf.import_tf_tensor(mesh, tf.zeros([3, 2]), S([a, b]))
> mtf.import_tf_tensor(mesh, tf.zeros([6]), S([a, b]))
> mtf.import_tf_tensor(mesh, 'x', S([]))
> mtf.import_tf_tensor(mesh, tf.placeholder_with_default(np.zeros([2], 'float32'), [None]), S([a]))
> mtf.import_tf_tensor(None, tf.zeros([2]), S([a]))
> mtf.import_tf_tensor(mesh, tf.zeros([2]), S([a]), name='named')
> mtf.import_tf_tensor(mesh, tf.zeros([2]), S([a]), 'named')
> mtf.import_tf_tensor(mesh, x, S([a, b]))
> mtf.import_tf_tensor(mesh, None, S([a]))
> mtf.import_tf_tensor(mesh, tf.constant([True, False]), S([a]))
import_fully_replicated @ mtf.import_fully_replicated -
> mtf.import_fully_replicated(mesh, tf.zeros([2, 3]), S([a, b]))
> mtf.import_fully_replicated(mesh, tf.zeros([2, 3]), S([a, b]), 'named')
> mtf.import_fully_replicated(mesh, tf.zeros([]), S([]))
> mtf.import_fully_replicated(mesh, tf.zeros([2, 3]), [a, b])
> mtf.import_fully_replicated(mesh, tf.zeros([2]), None)
import_laid_out_tensor @ mtf.import_laid_out_tensor -
> mtf.import_laid_out_tensor(mesh, impl.LaidOutTensor([tf.zeros([2])]), S([a]))
> mtf.import_laid_out_tensor(mesh, impl.LaidOutTensor([tf.zeros([2])]), [a])
> mtf.import_laid_out_tensor(mesh, impl.LaidOutTensor([tf.zeros([2])]), S([a]), name='named')
> mtf.import_laid_out_tensor(mesh, None, S([a]))
Print @ mtf.Print -
> mtf.Print(x, [x], 'message')
> mtf.Print(x, [x, s], 'message', summarize=2)
> mtf.Print(x, [], 'message')
> mtf.Print(x, x, 'message')
> mtf.Print(x, [x], None)
> mtf.Print(x, [x], 3)
> mtf.Print(x, ['x'], 'message')
> mtf.Print(x, [x])
> mtf.Print(None, [x], 'message')
scalar_summary @ mtf.scalar_summary name:new_name x:tensor{s}
> mtf.scalar_summary('n', x)
> mtf.scalar_summary('n', mtf.reduce_sum(x)) is s
> mtf.scalar_summary('n', 1.0)
depend @ mtf.depend -
> mtf.depend(x, [y])
> mtf.depend(x, [])
> mtf.depend(x, y)
> mtf.depend(x, [y.operation])
> mtf.depend(x, None)
> mtf.depend([x], [y])
> mtf.depend(x, [1.0])
assign @ mtf.assign var:variable new_val:tensor
> mtf.assign(v, x)
> mtf.assign(v, 1.0)
> mtf.assign(v, s)
> mtf.assign(v, mtf.transpose(x, S([b, a])))
> mtf.assign(v, mtf.cast(x, tf.bfloat16))
> mtf.assign([v, v2], [x, x])
> mtf.assign(w.operation, x, assign_fn=mtf.assign_add_slice)
> mtf.assign(v, x, None)
assign_add @ mtf.assign_add var:variable new_val:tensor
> mtf.assign_add(w, x)
assign_sub @ mtf.assign_sub var:variable new_val:tensor
gradients @ mtf.gradients -
> mtf.gradients([mtf.reduce_sum(mtf.square(x))], [x])
> mtf.gradients([mtf.square(x)], [x])
> mtf.gradients([mtf.square(x)], [x], grad_ys=[x])
> mtf.gradients([mtf.square(x)], [x], [x])
> mtf.gradients([mtf.square(x), x * 3.0], [x])
> mtf.gradients((mtf.square(x),), (x,))
> mtf.gradients([x], [x])
> mtf.gradients([mtf.reduce_sum(x)], [y])
> mtf.gradients([mtf.reduce_sum(x)], [x, y])
> mtf.gradients([mtf.stop_gradient(x)], [x])
> mtf.gradients(mtf.reduce_sum(x), x)
> mtf.gradients(mtf.reduce_sum(x), [x])
> mtf.gradients([], [x])
> mtf.gradients([mtf.reduce_sum(x)], [])
> mtf.gradients([None], [x])
> mtf.gradients([mtf.reduce_sum(x)], [None])
> mtf.gradients([mtf.square(x)], [x], grad_ys=[1.0])
> mtf.gradients([mtf.square(x)], [x], grad_ys=[])
> mtf.gradients([mtf.square(x)], [x], grad_ys=x)
> mtf.gradients([mtf.square(x)], [x], operations=graph.operations)
> mtf.gradients([mtf.square(x)], [x], operations=[])
> mtf.gradients([mtf.square(x)], ['x'])
> mtf.gradients([mtf.to_int32(x)], [x])
> mtf.gradients([mtf.argmax(x, b)], [x])
custom_gradient @ mtf.custom_gradient -
> mtf.custom_gradient(lambda t: t * 2.0, lambda **k: [k['output_grads'][0]], [x])
> mtf.custom_gradient(lambda t, u: (t * 2.0, u), None, [x, y])
> mtf.custom_gradient(lambda t: t * 2.0, None, x)
> mtf.custom_gradient(lambda: x * 2.0, None, [])
> mtf.custom_gradient(None, None, [x])
> mtf.custom_gradient(lambda t: 3.0, None, [x])
recompute_grad @ mtf.recompute_grad -
> mtf.recompute_grad(mtf.square, [x])
> mtf.recompute_grad(lambda t, u: (t, u), [x, y])
> mtf.recompute_grad(mtf.square, x)
> mtf.recompute_grad(mtf.square, [x], control_dependencies=False)
> mtf.gradients([mtf.recompute_grad(mtf.square, [x])], [x])
> mtf.recompute_grad(mtf.square, [])
while_loop @ mtf.while_loop -
> mtf.while_loop(lambda n: mtf.less(n, 3), lambda n: n + 1, [mtf.constant(mesh, 0, dtype=tf.int32)])
> mtf.while_loop(lambda n, t: mtf.less(n, 3), lambda n, t: [n + 1, t * 2.0], [mtf.constant(mesh, 0, dtype=tf.int32), x])
> mtf.while_loop(lambda n, t: mtf.less(n, 3), lambda n, t: (n + 1, t * 2.0), (mtf.constant(mesh, 0, dtype=tf.int32), x))
> mtf.while_loop(lambda n: mtf.less(n, 3), lambda n: [n + 1], mtf.constant(mesh, 0, dtype=tf.int32))
> mtf.while_loop(lambda n: mtf.less(n, 3), lambda n: [n + 1.0], [mtf.constant(mesh, 0, dtype=tf.int32)])
> mtf.while_loop(lambda: True, lambda: [], [])
> mtf.while_loop(lambda n: n, lambda n: [n + 1], [mtf.constant(mesh, 0, dtype=tf.int32)])
> mtf.while_loop(lambda n: mtf.less(n, 3), lambda n: [n, n], [mtf.constant(mesh, 0, dtype=tf.int32)])
> mtf.while_loop(lambda n: mtf.less(n, 3), lambda n: [n + 1], [mtf.constant(mesh, 0, dtype=tf.int32)], num_loop_vars=1)
> mtf.while_loop(lambda n: mtf.less(n, 3), lambda n: [n + 1], [mtf.constant(mesh, 0, dtype=tf.int32)], maximum_iterations=2)
serialize_training_step @ mtf.serialize_training_step -
> mtf.serialize_training_step({'x': mtf.gather(w, ids, a)}, lambda f: {'loss': mtf.reduce_sum(f['x'])}, batch, 2)
> mtf.serialize_training_step({'x': mtf.gather(w, ids, a)}, lambda f: {'loss': mtf.reduce_sum(f['x'])}, batch, 1)
> mtf.serialize_training_step({'x': mtf.gather(w, ids, a)}, lambda f: {'loss': mtf.reduce_sum(f['x'])}, batch, 3)
> mtf.serialize_training_step({'x': mtf.gather(w, ids, a)}, lambda f: {}, batch, 2)
> mtf.serialize_training_step({}, lambda f: {}, batch, 2)
"""

STRUCTURE = """
reduce_sum @ mtf.reduce_sum x:tensor disable_positional_args=none output_shape=shape{[b]} reduced_dim=dim name=name
> mtf.reduce_sum(x)
> mtf.reduce_sum(x, None, S([b]))
> mtf.reduce_sum(x, output_shape=[])
> mtf.reduce_sum(x, output_shape=[b, a])
> mtf.reduce_sum(x, output_shape=[c])
> mtf.reduce_sum(ints)
> mtf.reduce_sum(bools)
> mtf.reduce_sum(x, reduced_dim='a')
reduce_mean @ mtf.reduce_mean x:tensor disable_positional_args=none output_shape=shape{[b]} reduced_dim=dim name=name
> mtf.reduce_mean(x, output_shape=[])
> mtf.reduce_mean(ints)
reduce_max @ mtf.reduce_max x:tensor disable_positional_args=none output_shape=shape{[b]} reduced_dim=dim name=name
> mtf.reduce_max(ints)
reduce_min @ mtf.reduce_min x:tensor disable_positional_args=none output_shape=shape{[b]} reduced_dim=dim name=name
reduce_all @ mtf.reduce_all x:bools disable_positional_args=none output_shape=shape{[b]} reduced_dim=dim name=name
reduce_any @ mtf.reduce_any x:bools disable_positional_args=none output_shape=shape{[b]} reduced_dim=dim name=name
reduce_first @ mtf.reduce_first tensor:tensor reduced_dim:dim
reduce_logsumexp @ mtf.reduce_logsumexp x:tensor reduced_dim:dim extra_logit=operand{0.0} name=name
> mtf.reduce_logsumexp(x, b, extra_logit=1.0)
> mtf.reduce_logsumexp(x, b, s)
softmax @ mtf.softmax x:tensor reduced_dim:dim extra_logit=operand{0.0} name=name
> mtf.softmax(x, b, 1.0)
> mtf.softmax(x, [a, b])
log_softmax @ mtf.log_softmax x:tensor reduced_dim:dim extra_logit=operand{0.0} name=name
top_k @ mtf.top_k x:tensor reduced_dim:dim{b} k_dim:new_dim name=name
> mtf.top_k(x, b, D('k', 3))
> mtf.top_k(x, b, D('k', 4))
> mtf.top_k(ints, a, D('k', 1))
top_1 @ mtf.top_1 x:tensor reduced_dim:dim{b} name=name
argmax @ mtf.argmax x:tensor reduced_dim:dim name=name
> mtf.argmax(ints, a)
> mtf.argmax(x, reduced_dim=b)
nth_largest_element @ mtf.nth_largest_element x:tensor n:int reduced_dim:dim{b} name=name
nth_smallest_element @ mtf.nth_smallest_element x:tensor n:int reduced_dim:dim{b} name=name
einsum @ mtf.einsum xs:tensors{[x, y]} *output_shape=shape{[a, c]} reduced_dims=dims{[b]} name=name
> mtf.einsum([x])
> mtf.einsum([x, y])
> mtf.einsum([x, y], [c, a])
> mtf.einsum([x, y], reduced_dims=[])
> mtf.einsum([x, y], output_shape=S([a, b, c]))
> mtf.einsum([x, y], S([]))
> mtf.einsum([x, row, y], output_shape=[a])
> mtf.einsum([x, ints])
> mtf.einsum([ints, ints], [])
> mtf.einsum([x, s], x.shape)
> mtf.einsum([x, x], [a])
> mtf.einsum(x, y)
matmul @ mtf.matmul a:tensor b:operand output_shape=shape{[a, c]} reduced_dims=dims{[b]} name=name
> mtf.matmul(x, row)
> mtf.matmul(x, x)
> mtf.matmul(x, y, [a, c])
broadcast @ mtf.broadcast x:tensor new_shape:shape_or_none
> mtf.broadcast(s, [a])
> mtf.broadcast(x, x.shape) is x
> mtf.broadcast(x, [c, b, a])
> mtf.broadcast(x, 'a:2,b:3,c:4')
reshape @ mtf.reshape x:tensor new_shape:shape{[b, a]} name=name
> mtf.reshape(x, D('ab', 6))
> mtf.reshape(x, [D('ab', 6)])
> mtf.reshape(x, 'ab:6')
> mtf.reshape(s, [])
> mtf.reshape(s, [D('o', 1)])
> mtf.reshape(x, [a, D('n', 3)])
> mtf.reshape(x, [D('n', -1)])
> mtf.reshape(x, x.shape) is x
> mtf.reshape(x, [6])
transpose @ mtf.transpose x:tensor new_shape:shape{[b, a]} name=name
> mtf.transpose(x, x.shape) is x
> mtf.transpose(x, [a])
> mtf.transpose(x, [b, a, c])
rename_dimension @ mtf.rename_dimension x:tensor old_name:dim_name new_name:new_name
> mtf.rename_dimension(x, 'a', 'a')
> mtf.rename_dimension(x, a, 'n')
> mtf.rename_dimension(x.shape, 'a', 'n')
replace_dimensions @ mtf.replace_dimensions tensor_or_shape:tensor old_dim_or_dims:dim new_dim_or_dims:new_dim
> mtf.replace_dimensions(x, [a, b], D('ab', 6))
> mtf.replace_dimensions(x, b, [D('n', 1), D('m', 3)])
> mtf.replace_dimensions(x.shape, a, D('n', 2))
> mtf.replace_dimensions(x.shape, [a, b], [D('ab', 6)])
> mtf.replace_dimensions(x, a, D('n', 3))
> mtf.replace_dimensions(x, [b, a], D('ab', 6))
anonymize @ mtf.anonymize x:tensor
concat @ mtf.concat xs:tensors concat_dim_name:dim_name name=name
> mtf.concat([x, one_row], 'a')
> mtf.concat([x, one_row], a)
> mtf.concat([x], 'a')
> mtf.concat([x, y], 'b')
> mtf.concat([x, mtf.to_int32(x)], 'a')
> mtf.concat(x, 'a')
stack @ mtf.stack xs:tensors dim_name:new_name *axis=int{0} name=name
> mtf.stack([x, x], 'n', 1)
> mtf.stack([x, x], 'n', axis=-1)
> mtf.stack([x, mtf.to_int32(x)], 'n')
> mtf.stack([x], 'n')
unstack @ mtf.unstack x:tensor dim:dim name=name
split @ mtf.split x:tensor split_dim:dim num_or_size_splits:int{2} name=name
> mtf.split(x, b, [1, 2])
> mtf.split(x, b, (1, 2))
> mtf.split(x, b, np.array([1, 2]))
> mtf.split(x, b, [3])
> mtf.split(x, b, [0, 3])
> mtf.split(x, b, [])
> mtf.split(x, b, [2, 2])
> mtf.split(x, a, 1)
> mtf.split(x, 'a', 2)
mtf_slice @ mtf.slice x:tensor begin:int{0} size:int{1} slice_dim_name:dim_name name=name
> mtf.slice(x, 1, 2, 'b')
> mtf.slice(x, 0, 3, 'b')
> mtf.slice(x, 0, 0, 'b')
> mtf.slice(x, -1, 1, 'b')
> mtf.slice(x, 2, -1, 'b')
> mtf.mtf_slice(x, 0, 1, 'a')
> mtf.slice(x, 0, 1, a)
pad @ mtf.pad x:tensor paddings:filter{[1, 2]} dim_name:dim_name name=name
> mtf.pad(x, (0, 1), 'a')
> mtf.pad(x, [0, 0], 'a')
> mtf.pad(x, [1], 'a')
> mtf.pad(x, 1, 'a')
> mtf.pad(x, [-1, 0], 'b')
> mtf.pad(x, [1, 1], a)
> mtf.pad(x, np.array([1, 1]), 'a')
> mtf.pad(ints, [1, 1], 'a')
> mtf.pad(bools, [1, 1], 'a')
one_hot @ mtf.one_hot indices:ints output_dim:dim{b} *on_value=number{2.0} *off_value=number{-1.0} *dtype=dtype name=name
> mtf.one_hot(ints, 'b:3')
> mtf.one_hot(ints, 3)
> mtf.one_hot(ints, a)
> mtf.one_hot(ints, b, dtype=tf.bool)
> mtf.one_hot(ints, b, True, False, tf.bool)
> mtf.one_hot(ints, b, 1, 0, dtype=tf.int32)
> mtf.one_hot(x, c)
> mtf.one_hot(ints, ('b', 3))
gather @ mtf.gather weights:tensor indices:ints{ids} dim:dim output_shape=shape_or_none
> mtf.gather(x, ids, D('zz', 5))
> mtf.gather(x, ids, D('a', 5))
> mtf.gather(x, mtf.zeros(mesh, [], tf.int32), a)
> mtf.gather(x, 0, a)
> mtf.gather(x, x, a)
> mtf.gather(x, ids, 'a')
> mtf.gather(ints, ids, a)
> mtf.gather(bools, ids, a)
> mtf.gather(x, ids, a, output_shape=[b, batch, length])
> mtf.gather(x, ints, a)
cumsum @ mtf.cumsum x:tensor dim:dim *exclusive=bool
> mtf.cumsum(ints, a)
> mtf.cumsum(x, b, True)
> mtf.cumsum(bools, b)
shift @ mtf.shift x:tensor offset:int dim:dim wrap:bool name=name
> mtf.shift(x, 7, b, True)
> mtf.shift(x, -2, b, False)
> mtf.shift(x, 3, b, wrap=False)
dynamic_shift @ mtf.dynamic_shift x:tensor offset:ints{mtf.constant(mesh, 1, dtype=tf.int32)} dim:dim wrap:bool
> mtf.dynamic_shift(x, 1, b, True)
> mtf.dynamic_shift(x, ints, b, True)
> mtf.dynamic_shift(x, mtf.constant(mesh, 2.0), b, False)
halo_exchange @ mtf.halo_exchange -
> mtf.halo_exchange(x, a, b, 1)
> mtf.halo_exchange(x, a, b, 1, wrap=True)
> mtf.halo_exchange(x, a, b, 0)
> mtf.halo_exchange(x, a, b, 3)
> mtf.halo_exchange(x, a, b, 4)
> mtf.halo_exchange(x, None, b, 1)
> mtf.halo_exchange(x, c, b, 1)
> mtf.halo_exchange(x, a, c, 1)
> mtf.halo_exchange(x, a, b, -1)
> mtf.halo_exchange(x, 'a', 'b', 1)
> mtf.halo_exchange(x, a, b, 1.0)
left_halo_exchange @ mtf.left_halo_exchange -
> mtf.left_halo_exchange(x, a, b, 1)
> mtf.left_halo_exchange(x, a, b, 2, True)
> mtf.left_halo_exchange(x, a, b, 0)
> mtf.left_halo_exchange(x, None, b, 1)
> mtf.left_halo_exchange(x, a, c, 1)
> mtf.left_halo_exchange(x, a, b, None)
pool_tensor_1d @ mtf.pool_tensor_1d tensor:tensor pool_dim:dim reduce_fn=fn{mtf.reduce_max} pool_size=int{2}
> mtf.pool_tensor_1d(x, b)
> mtf.pool_tensor_1d(x, b, pool_size=3)
> mtf.pool_tensor_1d(x, a, mtf.reduce_sum, 1)
stride_tensor_1d @ mtf.stride_tensor_1d tensor:tensor pool_dim:dim pool_size=int{2}
> mtf.stride_tensor_1d(x, b)
> mtf.stride_tensor_1d(x, b, 3)
reduction_fn @ mtf.reduction_fn reduction_fn_string:reduction
> mtf.reduction_fn('SUM') is tf.reduce_sum
binary_reduction_fn @ mtf.binary_reduction_fn reduction_fn_string:reduction
> mtf.binary_reduction_fn('MAX') is tf.maximum
pool_fn @ mtf.pool_fn -
> mtf.pool_fn('AVG_2D')
> mtf.pool_fn('MAX_2D') is tf.nn.max_pool2d
> mtf.pool_fn('MAX_3D')
> mtf.pool_fn('AVG_3D') is tf.nn.avg_pool3d
> mtf.pool_fn('nope')
> mtf.pool_fn(None)
compatible_lazy_allreduce_sums @ mtf.compatible_lazy_allreduce_sums -
> mtf.compatible_lazy_allreduce_sums([])
> mtf.compatible_lazy_allreduce_sums([1])
> mtf.compatible_lazy_allreduce_sums([mtf.LazyAllreduceSum(impl4, four, [0])] * 2)
> mtf.compatible_lazy_allreduce_sums([mtf.LazyAllreduceSum(impl4, four, [0]), mtf.LazyAllreduceSum(impl4, four, [1])])
> mtf.compatible_lazy_allreduce_sums([mtf.LazyAllreduceSum(impl4, four, [0]), four])
> mtf.compatible_lazy_allreduce_sums(None)
convert_args_to_laid_out_tensors @ mtf.convert_args_to_laid_out_tensors -
> mtf.convert_args_to_laid_out_tensors([four])
> mtf.convert_args_to_laid_out_tensors([four, 3, None, 'x'])
> mtf.convert_args_to_laid_out_tensors([])
> mtf.convert_args_to_laid_out_tensors(None)
> mtf.convert_args_to_laid_out_tensors([[four]])
> mtf.convert_args_to_laid_out_tensors([mtf.LazyAllreduceSum(impl4, four, [0])])
conv2d_backprop_input @ mtf.conv2d_backprop_input -
> mtf.conv2d_backprop_input(image.shape, mtf.ones(mesh, 'fh:3,fw:3,in:2,out:2'), mtf.ones(mesh, 'batch:1,h:4,w:4,out:2'), (1, 1, 1, 1), 'SAME')
> mtf.conv2d_backprop_input(image.shape, mtf.ones(mesh, 'fh:3,fw:3,in:2,out:2'), mtf.ones(mesh, 'batch:1,h:4,w:4,out:2'), (1, 1, 1, 1), 'NONE')
> mtf.conv2d_backprop_input(None, mtf.ones(mesh, 'fh:3,fw:3,in:2,out:2'), mtf.ones(mesh, 'batch:1,h:4,w:4,out:2'), (1, 1, 1, 1), 'SAME')
conv2d_backprop_filter @ mtf.conv2d_backprop_filter -
> mtf.conv2d_backprop_filter(image, S('fh:3,fw:3,in:2,out:2'), mtf.ones(mesh, 'batch:1,h:4,w:4,out:2'), (1, 1, 1, 1), 'SAME')
> mtf.conv2d_backprop_filter(image, mtf.convert_to_shape('fh:3,fw:3,in:2,out:2'), mtf.ones(mesh, 'batch:1,h:4,w:4,out:2'), (1, 1, 1, 1), 'SAME')
> mtf.conv2d_backprop_filter(image, mtf.convert_to_shape('fh:3,fw:3,in:2,out:2'), mtf.ones(mesh, 'batch:1,h:4,w:4,out:2'), (1, 1, 1, 1), 'SAME', name='named')
conv2d_transpose_backprop_input @ mtf.conv2d_transpose_backprop_input -
> mtf.conv2d_transpose_backprop_input(image.shape, mtf.ones(mesh, 'fh:2,fw:2,out:2,in:2'), mtf.ones(mesh, 'batch:1,h:8,w:8,out:2'), (1, 2, 2, 1), 'SAME')
> mtf.conv2d_transpose_backprop_input(None, mtf.ones(mesh, 'fh:2,fw:2,out:2,in:2'), mtf.ones(mesh, 'batch:1,h:8,w:8,out:2'), (1, 2, 2, 1), 'SAME')
conv2d_transpose_backprop_filter @ mtf.conv2d_transpose_backprop_filter -
> mtf.conv2d_transpose_backprop_filter(image, mtf.convert_to_shape('fh:2,fw:2,out:2,in:2'), mtf.ones(mesh, 'batch:1,h:8,w:8,out:2'), (1, 2, 2, 1), 'SAME')
> mtf.conv2d_transpose_backprop_filter(None, mtf.convert_to_shape('fh:2,fw:2,out:2,in:2'), mtf.ones(mesh, 'batch:1,h:8,w:8,out:2'), (1, 2, 2, 1), 'SAME')
conv3d_backprop_input @ mtf.conv3d_backprop_input -
> mtf.conv3d_backprop_input(volume.shape, mtf.ones(mesh, 'fd:3,fh:3,fw:3,in:1,out:2'), mtf.ones(mesh, 'batch:1,d:4,h:4,w:4,out:2'), (1, 1, 1, 1, 1), 'SAME')
> mtf.conv3d_backprop_input('volume', mtf.ones(mesh, 'fd:3,fh:3,fw:3,in:1,out:2'), mtf.ones(mesh, 'batch:1,d:4,h:4,w:4,out:2'), (1, 1, 1, 1, 1), 'SAME')
conv3d_backprop_filter @ mtf.conv3d_backprop_filter -
> mtf.conv3d_backprop_filter(volume, mtf.convert_to_shape('fd:3,fh:3,fw:3,in:1,out:2'), mtf.ones(mesh, 'batch:1,d:4,h:4,w:4,out:2'), (1, 1, 1, 1, 1), 'SAME')
pool_backprop @ mtf.pool_backprop -
> mtf.pool_backprop(image, mtf.layers.avg_pool2d(image), mtf.layers.avg_pool2d(image), (2, 2), (2, 2), 'AVG_2D')
> mtf.pool_backprop(image, mtf.layers.max_pool2d(image), mtf.layers.max_pool2d(image), [2, 2], [2, 2], 'MAX_2D')
> mtf.pool_backprop(image, mtf.layers.max_pool2d(image), mtf.layers.max_pool2d(image), (2, 2), (2, 2), 'nope')
> mtf.pool_backprop(None, None, None, (2, 2), (2, 2), 'MAX_2D')
"""

OPERATIONS = """
AddOperation @ mtf.AddOperation x1:tensor x2:operand output_shape:shape_or_none name=name
BinaryOpWithBroadcasting @ mtf.BinaryOpWithBroadcasting tf_fn:fn{tf.add} x1:tensor x2:operand output_shape:shape_or_none output_dtype:dtype name=name
BroadcastOperation @ mtf.BroadcastOperation x:tensor output_shape:shape_or_none name=name
ConcatOperation @ mtf.ConcatOperation xs:tensors concat_dim_name:dim_name name=name
Constant @ mtf.Constant mesh:mesh value:number shape:shape dtype:dtype name=name
Depend @ mtf.Depend x:tensor dependencies:tensors{[y]} name=name
EinsumOperation @ mtf.EinsumOperation inputs:tensors{[x, y]} output_shape:shape{S([a, c])} name=name
ImportOperation @ mtf.ImportOperation -
> mtf.ImportOperation(mesh, tf.zeros([2]), S([a]))
> mtf.ImportOperation(mesh, tf.zeros([2]), S([a]), name='named')
> mtf.ImportOperation(mesh, tf.zeros([3]), S([a]))
> mtf.ImportOperation(mesh, None, S([a]))
> mtf.ImportOperation(mesh, tf.zeros([2]), None)
MinMaxOperation @ mtf.MinMaxOperation tf_fn:fn{tf.maximum} x1:tensor x2:operand{x} output_shape:shape_or_none{x.shape} name=name
OneHotOperation @ mtf.OneHotOperation indices:ints output_dim:dim{b} on_value:number off_value:number dtype:dtype name=name
PadOperation @ mtf.PadOperation x:tensor paddings:filter{[1, 2]} pad_dim_name:dim_name name=name
PoolOperation @ mtf.PoolOperation x:image ksize:filter{(2, 2)} strides:strides{(2, 2)} pool_fn_string:text{'AVG_2D'} name=name
PrintOperation @ mtf.PrintOperation x:tensor data:tensors message:text name=name
RandomOperation @ mtf.RandomOperation -
> random(mtf.RandomOperation(mesh, S([a]), tf.random.uniform))
> random(mtf.RandomOperation(mesh, S([a]), tf.random.normal, stddev=2.0))
> random(mtf.RandomOperation(mesh, S([a]), tf.truncated_normal))
> mtf.RandomOperation(mesh, S([a]), None)
> mtf.RandomOperation(mesh, 'a:2', tf.random.uniform)
> mtf.RandomOperation(None, S([a]), tf.random.uniform)
RangeOperation @ mtf.RangeOperation mesh:mesh dim:dim dtype:dtype{tf.int32} name=name
ReadVariable @ mtf.ReadVariable var:variable name=name
ReduceOperation @ mtf.ReduceOperation x:tensor output_shape:shape{S([b])} reduction_fn_string:reduction name=name
> mtf.ReduceOperation(x, S([b]), 'sum').outputs[0]
> mtf.ReduceOperation(x, S([a, b]), 'SUM')
> mtf.ReduceOperation(x, S([c]), 'SUM')
ReshapeOperation @ mtf.ReshapeOperation x:tensor new_shape:shape{S([b, a])} name=name
ScalarAddOperation @ mtf.ScalarAddOperation x:tensor scalar:number name=name
ScalarMultiplyOperation @ mtf.ScalarMultiplyOperation x:tensor scalar:number name=name
ScalarSummaryOperation @ mtf.ScalarSummaryOperation name:new_name x:tensor{s}
ShiftOperation @ mtf.ShiftOperation x:tensor offset:int dim:dim wrap:bool name=name
SliceOperation @ mtf.SliceOperation x:tensor begin:int{0} size:int{1} slice_dim_name:dim_name name=name
SlicewiseOperation @ mtf.SlicewiseOperation tf_fn:fn inputs:tensors{[x]} output_shapes:tensors{[x.shape]} output_dtypes:tensors{[tf.float32]} splittable_dims:dims name=name
> mtf.SlicewiseOperation(tf.sin, [x], [x.shape], [tf.float32], [a]).has_gradient
> mtf.SlicewiseOperation(tf.sin, [x], [x.shape], [tf.float32], [a]).unsplittable_dims
SplitOperation @ mtf.SplitOperation x:tensor split_dim:dim{b} num_or_size_splits:int{3} name=name
> mtf.SplitOperation(x, b, [1, 2])
StackOperation @ mtf.StackOperation xs:tensors dim_name:new_name axis:int{0} name=name
StopGradient @ mtf.StopGradient x:tensor name=name
TopKOperation @ mtf.TopKOperation x:tensor reduced_dim:dim{b} k_dim:new_dim name=name
UnstackOperation @ mtf.UnstackOperation x:tensor dim:dim name=name
GenericGradOperation @ mtf.GenericGradOperation -
> mtf.GenericGradOperation(mtf.exp(x).operation, [x])
> mtf.GenericGradOperation(mtf.exp(x).operation, [])
> mtf.GenericGradOperation(mtf.exp(x).operation, None)
> mtf.GenericGradOperation(x, [x])
Assign @ mtf.Assign variables:tensors{[v]} new_values:tensors{[x]} assign_fn=fn{mtf.assign_slice} name=name
> mtf.Assign([v], [x]).assign_fn is mtf.assign_slice
> mtf.Assign([v], [x]).variables
> mtf.Assign([v, v2], [x, x])
> mtf.Assign([v], [x, x])
> mtf.Assign(v, x)
Conv2dOperation @ mtf.Conv2dOperation -
> mtf.Conv2dOperation(image, mtf.ones(mesh, 'fh:3,fw:3,in:2,out:2'), (1, 1, 1, 1), 'SAME')
> mtf.Conv2dOperation(image, mtf.ones(mesh, 'fh:3,fw:3,in:2,out:2'), [1, 2, 2, 1], 'SAME', 'named')
> mtf.Conv2dOperation(image, mtf.ones(mesh, 'fh:3,fw:3,in:2,out:2'), (1, 1, 1, 1), 'VALID')
> mtf.Conv2dOperation(image, mtf.ones(mesh, 'fh:3,fw:3,in:2,out:2'), 1, 'SAME')
> mtf.Conv2dOperation(image, mtf.ones(mesh, 'fh:3,fw:3,other:2,out:2'), (1, 1, 1, 1), 'SAME')
> mtf.Conv2dOperation(image, None, (1, 1, 1, 1), 'SAME')
> mtf.Conv2dOperation(x, y, (1, 1, 1, 1), 'SAME')
Conv2dTransposeOperation @ mtf.Conv2dTransposeOperation -
> mtf.Conv2dTransposeOperation(image, mtf.ones(mesh, 'fh:2,fw:2,out:2,in:2'), (1, 2, 2, 1), 'SAME')
> mtf.Conv2dTransposeOperation(image, mtf.ones(mesh, 'fh:2,fw:2,out:2,in:2'), (2, 2), 'SAME')
> mtf.Conv2dTransposeOperation(image, mtf.ones(mesh, 'fh:2,fw:2,out:2,other:2'), (1, 2, 2, 1), 'SAME')
Conv3dOperation @ mtf.Conv3dOperation -
> mtf.Conv3dOperation(volume, mtf.ones(mesh, 'fd:3,fh:3,fw:3,in:1,out:2'), (1, 1, 1, 1, 1), 'SAME')
Conv3dTransposeOperation @ mtf.Conv3dTransposeOperation -
> mtf.Conv3dTransposeOperation(volume, mtf.ones(mesh, 'fd:2,fh:2,fw:2,out:2,in:1'), (1, 2, 2, 2, 1), 'SAME')
> mtf.Conv3dTransposeOperation(volume, mtf.ones(mesh, 'fd:2,fh:2,fw:2,out:2,in:1'), None, 'SAME')
WhileLoopOperation @ mtf.WhileLoopOperation -
> mtf.WhileLoopOperation(lambda n: mtf.less(n, 3), lambda n: [n + 1], [mtf.constant(mesh, 0, dtype=tf.int32)])
> mtf.WhileLoopOperation(lambda n: mtf.less(n, 3), lambda n: [n + 1], [mtf.constant(mesh, 0, dtype=tf.int32)], name='named')
> mtf.WhileLoopOperation(None, lambda n: [n + 1], [mtf.constant(mesh, 0, dtype=tf.int32)])
> mtf.WhileLoopOperation(lambda n: mtf.less(n, 3), None, [mtf.constant(mesh, 0, dtype=tf.int32)])
CustomGradientOperation @ mtf.CustomGradientOperation -
> mtf.CustomGradientOperation([x], [x], [mtf.exp(x)], None, [])
> mtf.CustomGradientOperation([x], [x], mtf.exp(x), None, [])
> mtf.CustomGradientOperation(None, [x], [mtf.exp(x)], None, [])
"""
