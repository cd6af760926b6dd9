"""Calls of layers, optimizers, automatic layouts, beam search and BERT."""

LAYERS = """
layers.dense @ layers.dense x:tensor new_dims:dims{[D('n', 2)]} *reduced_dims=dims{[b]} expert_dims=dims{[]} use_bias=bool activation=activation variable_dtype=variable_dtype name=name
> layers.dense(x, [D('n', 2)])
> layers.dense(x, D('n', 2))
> layers.dense(x, 'n:2')
> layers.dense(x, [c], reduced_dims=b)
> layers.dense(x, [D('n', 2)], activation='relu')
> layers.dense(x, [D('n', 2)], kernel_initializer=tf.ones_initializer(), use_bias=False)
layers.dense_product @ layers.dense_product x:tensor reduced_dims:dims{[b]} new_dims:dims{[D('n', 2)]} activation_functions=activation_name name=name
layers.layer_norm @ layers.layer_norm x:tensor dim:dim epsilon=number name=name
> layers.layer_norm(x, b)
> layers.layer_norm(x, [b])
layers.batch_norm @ layers.batch_norm -
> layers.batch_norm(sequence, False, 0.9)
> layers.batch_norm(sequence, 0, momentum=0.9, init_zero=True, name='named')
> layers.batch_norm(sequence, None, 0.9)
> layers.batch_norm(x, False, '0.9')
layers.weights_nonzero @ layers.weights_nonzero targets:ints dtype=dtype
> layers.weights_nonzero(x)
layers.softmax_cross_entropy_with_logits @ layers.softmax_cross_entropy_with_logits logits:tensor targets:tensor vocab_dim:dim{b} z_loss=number
> layers.softmax_cross_entropy_with_logits(x, ints, b)
> layers.softmax_cross_entropy_with_logits(x, ints, b, z_loss=0.1)
> layers.softmax_cross_entropy_with_logits(x, ints, c)
layers.sigmoid_cross_entropy_with_logits @ layers.sigmoid_cross_entropy_with_logits logits:tensor targets:tensor
> layers.sigmoid_cross_entropy_with_logits(x, bools)
> layers.sigmoid_cross_entropy_with_logits(x, mtf.to_int32(x))
> layers.sigmoid_cross_entropy_with_logits(x, row)
layers.embedding_weights @ layers.embedding_weights mesh:mesh vocab_dim:new_dim output_dim:new_dim{c} variable_dtype:variable_dtype name=name ensemble_dim=new_dim{D('e', 2)} initializer=initializer
> layers.embedding_weights(mesh, vocab, [c], vdtype)
layers.embedding @ layers.embedding indices:ints vocab_dim:new_dim output_dim:new_dim{c} variable_dtype:variable_dtype name=name
> layers.embedding(x, vocab, c, vdtype)
layers.conv1d @ layers.conv1d x:sequence output_dim:new_dim filter_size=int{3} stride=int
> layers.conv1d(sequence, D('n', 2), 3, 1, name='named')
> layers.conv1d(sequence, D('n', 2), 3, 1, unknown=1)
layers.conv2d @ layers.conv2d x:image output_dim:new_dim filter_size=filter strides=strides padding=padding filter_initializer=initializer variable_dtype=variable_dtype name=name
layers.conv2d_transpose @ layers.conv2d_transpose x:image output_dim:new_dim filter_size=filter{(2, 2)} padding=padding variable_dtype=variable_dtype name=name
layers.conv3d @ layers.conv3d x:volume output_dim:new_dim padding=padding variable_dtype=variable_dtype name=name
> layers.conv3d(volume, D('n', 2), [1, 1, 1])
layers.conv3d_transpose @ layers.conv3d_transpose x:volume output_dim:new_dim variable_dtype=variable_dtype name=name
layers.conv2d_with_blocks @ layers.conv2d_with_blocks x:image output_dim:new_dim filter_size=filter padding=padding h_blocks_dim=none w_blocks_dim=none name=name
layers.conv3d_with_blocks @ layers.conv3d_with_blocks x:volume output_dim:new_dim d_blocks_dim=none h_blocks_dim=none name=name
layers.conv2d_transpose_with_blocks @ layers.conv2d_transpose_with_blocks x:image output_dim:new_dim h_blocks_dim=none w_blocks_dim=none name=name
layers.conv3d_transpose_with_blocks @ layers.conv3d_transpose_with_blocks x:volume output_dim:new_dim d_blocks_dim=none h_blocks_dim=none name=name
layers.separable_conv1d @ layers.separable_conv1d x:sequence output_dim:new_dim min_relative_pos=int{-1} max_relative_pos=int use_bias=bool name=name
layers.max_pool2d @ layers.max_pool2d x:image ksize=filter{(2, 2)} name=name
layers.avg_pool2d @ layers.avg_pool2d x:image ksize=filter{(2, 2)} name=name
layers.max_pool3d @ layers.max_pool3d x:volume ksize=filter{(2, 2, 2)} name=name
layers.avg_pool3d @ layers.avg_pool3d x:volume ksize=filter{(2, 2, 2)} name=name
layers.corr @ layers.corr x:tensor dim:dim epsilon=number name=name
layers.compress_mean @ layers.compress_mean x:tensor dim:dim compression_factor:int{2}
layers.multiplicative_jitter @ layers.multiplicative_jitter -
> random(layers.multiplicative_jitter(x))
> layers.multiplicative_jitter(x, 0) is x
> layers.multiplicative_jitter(x, 0.0) is x
> layers.multiplicative_jitter(x, 'a')
> layers.multiplicative_jitter(None)
layers.annealed_dropout @ layers.annealed_dropout -
> layers.annealed_dropout(x, False, 1, 10, 0.5)
> layers.annealed_dropout(x, False, 10, 1, 0.5)
> layers.annealed_dropout(x, True, 10, 1, 0.5)
> layers.annealed_dropout(x, True, 1, 10)
> layers.annealed_dropout(x, True, None, None, 0.5)
layers.clip_activation_gradient @ layers.clip_activation_gradient -
> layers.clip_activation_gradient(x)
> layers.clip_activation_gradient(x, 1.0)
> layers.clip_activation_gradient(x, 'a')
> layers.clip_activation_gradient(None)
layers.rename_length_to_memory_length @ layers.rename_length_to_memory_length x:sequence length_name=dim_name{'length'} memory_length_name=new_name
layers.attention_mask_same_segment @ layers.attention_mask_same_segment -
> layers.attention_mask_same_segment(ids)
> layers.attention_mask_same_segment(ids, ids)
> layers.attention_mask_same_segment(ids, dtype=tf.bfloat16)
> layers.attention_mask_same_segment(ids, layers.rename_length_to_memory_length(ids))
> layers.attention_mask_same_segment(None)
layers.attention_mask_autoregressive @ layers.attention_mask_autoregressive -
> layers.attention_mask_autoregressive(mtf.range(mesh, length, tf.int32))
> layers.attention_mask_autoregressive(ids, tf.bfloat16)
> layers.attention_mask_autoregressive(None)
> layers.attention_mask_autoregressive(ints)
layers.attention_mask_ignore_padding @ layers.attention_mask_ignore_padding -
> layers.attention_mask_ignore_padding(ids)
> layers.attention_mask_ignore_padding(ids, 'float32')
> layers.attention_mask_ignore_padding(3)
layers.attention_bias_local_block @ layers.attention_bias_local_block -
> layers.attention_bias_local_block(mesh, length, memory_length)
> layers.attention_bias_local_block(mesh, length, memory_length, tf.float32)
> layers.attention_bias_local_block(mesh, 'length', memory_length)
> layers.attention_bias_local_block(None, length, memory_length)
layers.attention_bias_local_2d_block @ layers.attention_bias_local_2d_block -
> layers.attention_bias_local_2d_block(mesh, h, w_dim, D('mh', 4), D('mw', 4))
> layers.attention_bias_local_2d_block(mesh, h, w_dim, None, D('mw', 4))
layers.multihead_attention_params @ layers.multihead_attention_params -
> layers.multihead_attention_params(mesh, heads, d_model, D('kv', 2), vdtype)
> layers.multihead_attention_params(mesh, heads, d_model, D('kv', 2), vdtype, combine=True)
> layers.multihead_attention_params(mesh, 2, d_model, D('kv', 2), vdtype)
layers.multihead_attention_vars @ layers.multihead_attention_vars -
> layers.multihead_attention_vars(mesh, heads, d_model, D('kv', 2), tf.float32, tf.float32, tf.float32)
> layers.multihead_attention_vars(mesh, heads, 'd_model', D('kv', 2), tf.float32, tf.float32, tf.float32)
layers.multihead_attention @ layers.multihead_attention -
> layers.multihead_attention(sequence, None, None, D('kv', 2), heads, False)
> layers.multihead_attention(sequence, sequence, None, D('kv', 2), heads, False)
> layers.multihead_attention(sequence, None, None, 2, heads, False)
> layers.multihead_attention(sequence, None, None, D('kv', 2), heads, 0, dropout=0.5)
> layers.multihead_attention(None, None, None, D('kv', 2), heads, False)
layers.dense_relu_dense @ layers.dense_relu_dense -
> layers.dense_relu_dense(sequence, D('hidden', 4), False)
> layers.dense_relu_dense(sequence, D('hidden', 4), False, dropout=0.5, name='named')
> layers.dense_relu_dense(sequence, 'hidden', False)
> layers.dense_relu_dense(None, D('hidden', 4), False)
layers.us_einsum @ layers.us_einsum -
> layers.us_einsum([x, y], output_shape=[a, c])
> layers.us_einsum([x, y], [a, c])
> layers.us_einsum(x, y)
layers.unit_scaling_convention @ layers.unit_scaling_convention -
> layers.unit_scaling_convention()
> layers.unit_scaling_convention(True)
> layers.unit_scaling_convention(value='x')
layers.VarianceScalingInitializer @ layers.VarianceScalingInitializer -
> layers.VarianceScalingInitializer()([a], [b])
> layers.VarianceScalingInitializer(2.0, 'fan_out', 'uniform')([a], [b])
> layers.VarianceScalingInitializer(mode='nope')([a], [b])
> layers.VarianceScalingInitializer(distribution='nope')([a], [b])
> layers.VarianceScalingInitializer(scale='x')([a], [b])
> layers.VarianceScalingInitializer(mode='fan_avg')([], [b])
> layers.VarianceScalingInitializer()(a, b)
layers.DenseInitializer @ layers.DenseInitializer -
> layers.DenseInitializer()([a], [b])
> layers.DenseInitializer(1)
layers.get_dense_kernel_weights @ layers.get_dense_kernel_weights -
> layers.get_dense_kernel_weights(x, [c], [b], [], None)
> layers.get_dense_kernel_weights(x, [c], [b], [a], None, name='named')
> layers.get_dense_kernel_weights(x, c, b, [], None)
> layers.get_dense_kernel_weights(x, [c], [b], [], tf.ones_initializer())
layers.reversible_half_residual_and_swap @ layers.reversible_half_residual_and_swap -
> layers.reversible_half_residual_and_swap(x, None, x, None, mtf.square)
> layers.reversible_half_residual_and_swap(x, x, x, x, mtf.square)
> layers.reversible_half_residual_and_swap(x, None, x, None, None)
layers.summary_for_clip_activation_gradient @ layers.summary_for_clip_activation_gradient -
> layers.summary_for_clip_activation_gradient(x)
> layers.summary_for_clip_activation_gradient(x, 'named', [a])
> layers.summary_for_clip_activation_gradient(None)
layers.dot_product_attention @ layers.dot_product_attention -
> layers.dot_product_attention(mtf.ones(mesh, 'length:4,k:2'), mtf.ones(mesh, 'memory_length:4,k:2'), mtf.ones(mesh, 'memory_length:4,v:2'), None, False)
> layers.dot_product_attention(mtf.ones(mesh, 'length:4,k:2'), mtf.ones(mesh, 'memory_length:4,k:2'), mtf.ones(mesh, 'memory_length:4,v:2'), None, False, extra_logit=0.0)
> layers.dot_product_attention(None, None, None, None, False)
layers.multihead_self_attention_memory_compressed @ layers.multihead_self_attention_memory_compressed -
> layers.multihead_self_attention_memory_compressed(sequence, False, 2, D('kv', 2), heads, False)
> layers.multihead_self_attention_memory_compressed(sequence, True, 2, D('kv', 2), heads, False)
> layers.multihead_self_attention_memory_compressed(sequence, False, 3, D('kv', 2), heads, False)
"""

OPTIMIZE = """
optimize.SgdOptimizer @ optimize.SgdOptimizer learning_rate:number
> optimize.SgdOptimizer(0.1).lr
> optimize.SgdOptimizer(0.1).apply_grad(x, v)
> optimize.SgdOptimizer(0.1).apply_grads([x], [v])
> optimize.SgdOptimizer(0.1).apply_grads([x], [v, v2])
> optimize.SgdOptimizer(0.1).apply_grads([x, x], [v])
> optimize.SgdOptimizer(0.1).apply_grads([None], [v])
> optimize.SgdOptimizer(0.1).apply_grads([], [])
> optimize.SgdOptimizer(0.1).apply_grads(x, v)
> optimize.SgdOptimizer('0.1').apply_grad(x, v)
> optimize.SgdOptimizer(tf.constant(0.1)).apply_grad(x, v)
> optimize.SgdOptimizer(0.1).apply_grad(row, v)
> optimize.SgdOptimizer(0.1).apply_grad(None, v)
> optimize.SgdOptimizer(0.1).apply_grad(x, w)
> optimize.SgdOptimizer(0.1).apply_grad(x, None)
optimize.MomentumOptimizer @ optimize.MomentumOptimizer learning_rate:number momentum:number
> optimize.MomentumOptimizer(0.1, 0.9).momentum
> optimize.MomentumOptimizer(0.1, 0.9).lr
> optimize.MomentumOptimizer(0.1, 0.9).apply_grad(x, v)
> optimize.MomentumOptimizer(0.1, None).apply_grad(x, v)
> optimize.MomentumOptimizer(0.1)
optimize.AdafactorOptimizer @ optimize.AdafactorOptimizer -
> optimize.AdafactorOptimizer().apply_grad(x, v)
> optimize.AdafactorOptimizer(learning_rate=0.1).apply_grads([x], [v])
> optimize.AdafactorOptimizer(False, 0.1, beta1=0.9).apply_grad(x, v)
> optimize.AdafactorOptimizer(learning_rate=0.1, min_dim_size_to_factor=1).apply_grad(x, v)
> optimize.AdafactorOptimizer(learning_rate=0.1, clipping_threshold=None).apply_grad(x, v)
> optimize.AdafactorOptimizer(learning_rate=0.1, decay_rate=0.5).apply_grad(x, v)
> optimize.AdafactorOptimizer(learning_rate='0.1').apply_grad(x, v)
> optimize.AdafactorOptimizer(unknown=1)
> optimize.AdafactorOptimizer(learning_rate=0.1).apply_grad(None, v)
> optimize.AdafactorOptimizer(learning_rate=0.1, stacked_dim_names='a').apply_grad(x, v)
optimize.AdamWeightDecayOptimizer @ optimize.AdamWeightDecayOptimizer -
> optimize.AdamWeightDecayOptimizer(0.1).apply_grad(x, v)
> optimize.AdamWeightDecayOptimizer(0.1, 0.01, exclude_from_weight_decay=['v']).apply_grad(x, v)
> optimize.AdamWeightDecayOptimizer(0.1, 0.01, 0.5, 0.5, 1e-3).apply_grads([x], [v])
> optimize.AdamWeightDecayOptimizer(0.1, 0.01, exclude_from_weight_decay='v').apply_grad(x, v)
> optimize.AdamWeightDecayOptimizer()
> optimize.AdamWeightDecayOptimizer('x').apply_grad(x, v)
> optimize.AdamWeightDecayOptimizer(0.1).apply_grad(None, v)
optimize.AdafactorWithMultiLRSchedule @ optimize.AdafactorWithMultiLRSchedule -
> optimize.AdafactorWithMultiLRSchedule(learning_rate=0.1).apply_grad(x, v)
> optimize.AdafactorWithMultiLRSchedule(['v'], [[lambda step, total_train_steps: 0.5]], learning_rate=0.1)
> optimize.AdafactorWithMultiLRSchedule(['v'], None, learning_rate=0.1)
> optimize.AdafactorWithMultiLRSchedule(['v'], [1, 2], learning_rate=0.1)
optimize.AdamWithMultiLRSchedule @ optimize.AdamWithMultiLRSchedule -
> optimize.AdamWithMultiLRSchedule(learning_rate=0.1).apply_grad(x, v)
> optimize.AdamWithMultiLRSchedule(['v'], None, learning_rate=0.1)
> optimize.AdamWithMultiLRSchedule()
optimize.Optimizer @ optimize.Optimizer -
> optimize.Optimizer()
> optimize.Optimizer().apply_grad(x, v)
> optimize.Optimizer().apply_grads([x], [v])
optimize.adafactor_decay_rate_adam @ optimize.adafactor_decay_rate_adam beta2:number
optimize.adafactor_decay_rate_pow @ optimize.adafactor_decay_rate_pow exponent=number offset=int{0}
optimize.reduce_rms @ optimize.reduce_rms x:tensor
> optimize.reduce_rms(x, reduced_dim=a)
> optimize.reduce_rms(x, output_shape=[a])
> optimize.reduce_rms(x, unknown=1)
optimize.make_optimizer @ optimize.make_optimizer -
> optimize.make_optimizer(moe.HParams(optimizer='sgd'), 0.1)
> optimize.make_optimizer(moe.HParams(optimizer='SGD'), 0.1)
> optimize.make_optimizer(moe.HParams(optimizer='nope'), 0.1)
> optimize.make_optimizer(None, 0.1)
optimize.compute_lr_for_step @ optimize.compute_lr_for_step -
> optimize.compute_lr_for_step([lambda step, total_train_steps: 0.5], 2.0)
> optimize.compute_lr_for_step([lambda step, total_train_steps: 0.5], 2.0, 10)
> optimize.compute_lr_for_step([], 2.0)
> optimize.compute_lr_for_step(None, 2.0)
optimize.product_learning_rate @ optimize.product_learning_rate step:step total_train_steps:steps factors:tensors{[lambda step, total_train_steps: 0.5]} offset=int{0}
graph_interface.GraphInterface @ graph_interface.GraphInterface -
> (mtf.exp(x), graph_interface.GraphInterface(graph).get_num_operations())
> (mtf.exp(x), list(graph_interface.GraphInterface(graph).get_all_operation_names()))
> (mtf.exp(x), list(graph_interface.GraphInterface(graph).get_all_tensor_names()))
> (mtf.exp(x), list(graph_interface.GraphInterface(graph).get_operation_input_names('exp')))
> (mtf.exp(x), list(graph_interface.GraphInterface(graph).get_operation_output_names('exp')))
> (mtf.exp(x), graph_interface.GraphInterface(graph).get_operation_input_names('nope'))
> (mtf.exp(x), graph_interface.GraphInterface(graph).get_tensor_dtype('exp:0'))
> (mtf.exp(x), graph_interface.GraphInterface(graph).get_tensor_dtype('nope'))
> (mtf.exp(x), graph_interface.GraphInterface(graph).get_tensor_shape('exp:0'))
> (mtf.exp(x), graph_interface.GraphInterface(graph).get_tensor_num_entries('exp:0'))
> (mtf.exp(x), graph_interface.GraphInterface(graph).get_tensor_num_entries('exp:0', {'a': 'rows'}, {'rows': 2}))
> (mtf.exp(x), graph_interface.GraphInterface(graph).get_tensor_size('exp:0'))
> (mtf.exp(x), graph_interface.GraphInterface(graph).get_tensor_size('exp:0', partial_layout={'b': 'rows'}, mesh_dimension_to_size={'rows': 2}))
> (mtf.exp(x), graph_interface.GraphInterface(graph).get_tensor_device('exp:0'))
> (mtf.exp(x), graph_interface.GraphInterface(graph).is_tensor_on_canonical_device('exp:0'))
> (mtf.exp(x), graph_interface.GraphInterface(graph, 'cpu:0').is_tensor_on_canonical_device('exp:0'))
> (mtf.exp(x), graph_interface.GraphInterface(graph).get_operation_device('exp'))
> (mtf.exp(x), graph_interface.GraphInterface(graph).get_tensor_mtf_dimension_names('exp:0'))
> (mtf.exp(x), graph_interface.GraphInterface(graph).get_operation_mtf_dimension_names('exp'))
> (mtf.exp(x), graph_interface.GraphInterface(graph).set_tensor_final('exp:0'))
> (mtf.exp(x), graph_interface.GraphInterface(graph).is_tensor_final('exp:0'))
> graph_interface.GraphInterface(tf.get_default_graph()).get_num_operations()
> graph_interface.GraphInterface(None).get_num_operations()
> graph_interface.GraphInterface('graph').get_all_operation_names()
GraphInterface.compute_cost_graph -
> (mtf.exp(x), [n.name for n in graph_interface.GraphInterface(graph).compute_cost_graph().node])
> (mtf.exp(x), [n.device for n in graph_interface.GraphInterface(graph).compute_cost_graph().node])
> (mtf.exp(x), [len(n.output_info) for n in graph_interface.GraphInterface(graph).compute_cost_graph(devices=[]).node])
> (mtf.exp(x), [str(o.shape) for n in graph_interface.GraphInterface(graph).compute_cost_graph(devices=[]).node for o in n.output_info])
> (mtf.exp(x), [str(o.shape) for n in graph_interface.GraphInterface(graph).compute_cost_graph().node for o in n.output_info])
> (mtf.exp(x), [str(o.size) for n in graph_interface.GraphInterface(graph).compute_cost_graph(devices=['']).node for o in n.output_info])
> (mtf.exp(x), [o.alias_input_port for n in graph_interface.GraphInterface(graph).compute_cost_graph(['']).node for o in n.output_info])
> (mtf.exp(x), [len(n.control_input) for n in graph_interface.GraphInterface(graph).compute_cost_graph(3).node])
GraphInterface.compute_memory_contents_under_schedule -
> (mtf.exp(x), graph_interface.GraphInterface(graph).compute_memory_contents_under_schedule([0, 1]))
> (mtf.exp(x), graph_interface.GraphInterface(graph).compute_memory_contents_under_schedule([1, 0]))
> (mtf.exp(x), graph_interface.GraphInterface(graph).compute_memory_contents_under_schedule([7]))
> (mtf.exp(x), graph_interface.GraphInterface(graph).compute_memory_contents_under_schedule([]))
> (mtf.exp(x), graph_interface.GraphInterface(graph).compute_memory_contents_under_schedule(None))
scheduler.minimize_peak_memory @ scheduler.minimize_peak_memory -
> (mtf.exp(x), scheduler.minimize_peak_memory(graph_interface.GraphInterface(graph), 'LIST'))
> (mtf.exp(x), scheduler.minimize_peak_memory(graph_interface.GraphInterface(graph), 'NAIVE'))
> (mtf.exp(x), scheduler.minimize_peak_memory(graph_interface.GraphInterface(graph), 'nope'))
> scheduler.minimize_peak_memory(None, 'LIST')
valid_layouts.LayoutValidator @ valid_layouts.LayoutValidator -
> (mtf.exp(x), valid_layouts.LayoutValidator(graph, S([rows])).splittable_mtf_dimension_names)
> (mtf.exp(x), valid_layouts.LayoutValidator(graph, S([rows])).mesh_dimension_name_to_size)
> (mtf.exp(x), valid_layouts.LayoutValidator(graph, S([rows])).is_valid_assignment('a', 'rows'))
> (mtf.exp(x), valid_layouts.LayoutValidator(graph, S([rows])).is_valid_assignment('b', 'rows'))
> (mtf.exp(x), valid_layouts.LayoutValidator(graph, S([rows])).is_valid_assignment('nope', 'rows'))
> (mtf.exp(x), valid_layouts.LayoutValidator(graph, S([rows])).is_valid_assignment('a', 'nope'))
> (mtf.concat([x, x], 'a'), valid_layouts.LayoutValidator(graph, S([rows])).is_valid_assignment('a', 'rows'))
> valid_layouts.LayoutValidator(None, S([rows]))
memory_estimator.MemoryEstimator @ memory_estimator.MemoryEstimator -
> memory_estimator.MemoryEstimator(graph, S([rows]), [x]).get_layout_validator()
> memory_estimator.MemoryEstimator(graph, S([rows]), [x]).get_graph_interface()
> memory_estimator.MemoryEstimator(graph, S([rows]), [x]).get_graph_interface().is_tensor_final('import:0')
> memory_estimator.MemoryEstimator(None, S([rows]), [])
layout_optimizer.LayoutOptimizer @ layout_optimizer.LayoutOptimizer -
> (mtf.exp(x), layout_optimizer.LayoutOptimizer(memory_estimator.MemoryEstimator(graph, S([rows]))).solve())
> (mtf.exp(x), layout_optimizer.LayoutOptimizer(memory_estimator.MemoryEstimator(graph, S([rows]))).evaluate_layout('a:rows'))
> (mtf.exp(x), layout_optimizer.LayoutOptimizer(memory_estimator.MemoryEstimator(graph, S([rows]))).evaluate_layout(''))
> layout_optimizer.LayoutOptimizer(None).solve()
auto_mtf.layout @ auto_mtf.layout -
> (mtf.exp(x), auto_mtf.layout(graph, S([rows])))
> (mtf.exp(x), auto_mtf.layout(graph, S([rows]), [x]))
> auto_mtf.layout(None, S([rows]))
> (mtf.exp(x), auto_mtf.layout(graph, None))
auto_mtf.layout_and_mesh_shape @ auto_mtf.layout_and_mesh_shape -
> (mtf.exp(x), auto_mtf.layout_and_mesh_shape(graph, 2))
> (mtf.exp(x), auto_mtf.layout_and_mesh_shape(graph, 1))
> (mtf.exp(x), auto_mtf.layout_and_mesh_shape(graph, 2, [x], 1))
> auto_mtf.layout_and_mesh_shape(graph, '2')
beam_search.compute_topk_scores_and_seq @ beam_search.compute_topk_scores_and_seq -
> beam_search.compute_topk_scores_and_seq(mtf.zeros(mesh, 'batch:1,beam:4,length:2', tf.int32), mtf.import_tf_tensor(mesh, [[1.0, 3.0, 2.0, 0.0]], 'batch:1,beam:4'), mtf.import_tf_tensor(mesh, [[1.0, 3.0, 2.0, 0.0]], 'batch:1,beam:4'), mtf.zeros(mesh, 'batch:1,beam:4', tf.bool), D('beam', 2))
> beam_search.compute_topk_scores_and_seq(None, None, None, None, D('beam', 2))
"""

BERT = """
bert.get_activation @ bert.get_activation -
> bert.get_activation('relu')
> bert.get_activation('gelu')
> bert.get_activation('tanh')
> bert.get_activation('linear')
> bert.get_activation('')
> bert.get_activation(None)
> bert.get_activation('RELU')
> bert.get_activation('nope')
> bert.get_activation(mtf.relu) is mtf.relu
> bert.get_activation(3)
bert.layer_norm @ bert.layer_norm x:tensor dim:dim epsilon=number subtract_mean=bool use_scale=bool use_bias=bool name=name
bert.BertConfig @ bert.BertConfig -
> bert.BertConfig(10).to_dict()
> bert.BertConfig(vocab_size=10, d_model=8).to_dict()['d_model']
> bert.BertConfig('10').to_dict()['vocab_size']
> bert.BertConfig(None).to_dict()['vocab_size']
> bert.BertConfig()
> bert.BertConfig(10, unknown=3)
> bert.BertConfig.from_dict({'vocab_size': 10}).num_blocks
> bert.BertConfig.from_dict({}).vocab_size
> bert.BertConfig.from_dict(None)
> bert.BertConfig.from_dict({'vocab_size': 10, 'unknown': 3}).to_dict()['unknown']
> bert.BertConfig(10).to_json_string()
> bert.BertConfig.from_json_file('/nowhere')
optimization.clip_by_global_norm @ optimization.clip_by_global_norm -
> optimization.clip_by_global_norm([x, x], mtf.constant(mesh, 1.0))
> optimization.clip_by_global_norm([x, None], mtf.constant(mesh, 1.0))
> optimization.clip_by_global_norm([x], 1.0)
> optimization.clip_by_global_norm([], mtf.constant(mesh, 1.0))
> optimization.clip_by_global_norm(None, 1.0)
tokenization.convert_to_unicode @ tokenization.convert_to_unicode text:text
> tokenization.convert_to_unicode(b'abc')
> tokenization.convert_to_unicode(b'\\xff')
tokenization.printable_text @ tokenization.printable_text text:text
> tokenization.printable_text(b'abc')
tokenization.whitespace_tokenize @ tokenization.whitespace_tokenize text:text
> tokenization.whitespace_tokenize('  a  b ')
> tokenization.whitespace_tokenize(b'a b')
tokenization.load_vocab @ tokenization.load_vocab -
> dict(tokenization.load_vocab(vocab_file))
> tokenization.load_vocab('/nowhere')
> tokenization.load_vocab(None)
> len(tokenization.load_vocab(vocab_file))
tokenization.convert_by_vocab @ tokenization.convert_by_vocab -
> tokenization.convert_by_vocab({'a': 1, 'b': 2}, ['b', 'a'])
> tokenization.convert_by_vocab({'a': 1}, ['zz'])
> tokenization.convert_by_vocab({'a': 1}, 'aa')
> tokenization.convert_by_vocab({'a': 1}, [])
> tokenization.convert_by_vocab({'a': 1}, None)
> tokenization.convert_by_vocab(None, ['a'])
tokenization.convert_tokens_to_ids @ tokenization.convert_tokens_to_ids -
> tokenization.convert_tokens_to_ids({'a': 1}, ['a'])
> tokenization.convert_tokens_to_ids({'a': 1}, ['zz'])
> tokenization.convert_tokens_to_ids({'a': 1}, ('a', 'a'))
tokenization.convert_ids_to_tokens @ tokenization.convert_ids_to_tokens -
> tokenization.convert_ids_to_tokens({1: 'a'}, [1])
> tokenization.convert_ids_to_tokens({1: 'a'}, [2])
> tokenization.convert_ids_to_tokens({1: 'a'}, 1)
tokenization.preserve_token @ tokenization.preserve_token -
> tokenization.preserve_token('[UNK]', {'[UNK]': 1})
> tokenization.preserve_token('a', {})
> tokenization.preserve_token(None, {})
tokenization.validate_case_matches_checkpoint @ tokenization.validate_case_matches_checkpoint -
> tokenization.validate_case_matches_checkpoint(True, 'uncased_L-12_H-768_A-12/bert_model.ckpt')
> tokenization.validate_case_matches_checkpoint(False, 'uncased_L-12_H-768_A-12/bert_model.ckpt')
> tokenization.validate_case_matches_checkpoint(True, 'cased_L-12_H-768_A-12/bert_model.ckpt')
> tokenization.validate_case_matches_checkpoint(True, '')
> tokenization.validate_case_matches_checkpoint(True, None)
> tokenization.validate_case_matches_checkpoint(None, 'model')
> tokenization.validate_case_matches_checkpoint(True, 3)
tokenization.BasicTokenizer @ tokenization.BasicTokenizer -
> tokenization.BasicTokenizer().tokenize('Hello, World!')
> tokenization.BasicTokenizer(False).tokenize('Hello, World!')
> tokenization.BasicTokenizer(do_lower_case=1).tokenize('ÀÉ 中文 \\t x')
> tokenization.BasicTokenizer().tokenize('')
> tokenization.BasicTokenizer().tokenize(b'bytes here')
> tokenization.BasicTokenizer().tokenize(None)
> tokenization.BasicTokenizer().tokenize(3)
> tokenization.BasicTokenizer().tokenize(['a'])
tokenization.WordpieceTokenizer @ tokenization.WordpieceTokenizer -
> tokenization.WordpieceTokenizer({'un': 0, '##aff': 1}).tokenize('unaff')
> tokenization.WordpieceTokenizer({'un': 0}).tokenize('unaff un')
> tokenization.WordpieceTokenizer({'un': 0}, unk_token='?').tokenize('x')
> tokenization.WordpieceTokenizer({'un': 0}, '?', 1).tokenize('un')
> tokenization.WordpieceTokenizer({}).tokenize('')
> tokenization.WordpieceTokenizer(None).tokenize('a')
> tokenization.WordpieceTokenizer({}).tokenize(None)
> tokenization.WordpieceTokenizer(['un']).tokenize('un')
tokenization.FullTokenizer @ tokenization.FullTokenizer -
> tokenization.FullTokenizer(vocab_file).tokenize('The quick foxes, unaffable')
> tokenization.FullTokenizer(vocab_file, False).tokenize('The quick [MASK]')
> tokenization.FullTokenizer(vocab_file).convert_tokens_to_ids(['the', '[UNK]'])
> tokenization.FullTokenizer(vocab_file).convert_tokens_to_ids(['zz'])
> tokenization.FullTokenizer(vocab_file).convert_ids_to_tokens([5, 0])
> tokenization.FullTokenizer(vocab_file).convert_ids_to_tokens([99])
> tokenization.FullTokenizer(vocab_file).tokenize(None)
> tokenization.FullTokenizer('/nowhere')
> tokenization.FullTokenizer(None)
"""
