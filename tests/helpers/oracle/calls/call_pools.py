"""Arguments by kind of parameter: expressions in the names of `call_environment`.

Each kind has what is usual, first what goes with the other parameters' first; what is legal but
unusual; and what is wrong.  Whether a call as a whole is legal is for the packages to say.
"""

POOLS = {
    # kind: (usual, unusual, wrong)
    "tensor": (
        ["x"],
        ["s", "w", "half", "one_row", "mtf.transpose(x, S([b, a]))", "mtf.reduce_sum(x, reduced_dim=a)"],
        ["None", "'x'", "[x]", "a", "x.shape", "ints"],
    ),
    "ints": (["ints"], ["mtf.to_int32(s)", "mtf.mtf_range(mesh, b, tf.int32)"], ["x", "None", "1", "'i'", "[0, 1]"]),
    "bools": (["bools"], ["mtf.greater(x, 0.0)", "mtf.less(s, 2.0)"], ["x", "None", "'p'", "ints"]),
    "operand": (
        ["y", "x"],
        ["2", "2.0", "np.float32(2)", "np.float64(0.5)", "s", "row", "half"],
        ["None", "'2'", "[1.0]", "a", "x.shape", "ints"],
    ),
    "tensors": (
        ["[x, x]"], ["(x, x)", "[x]", "[x, y]", "[x, s]"], ["x", "[]", "None", "[x, None]", "[x, 'x']", "'xx'"]
    ),
    "shape": (
        ["S([a, b])"],
        ["[a, b]", "'a:2,b:3'", "(a, b)", "[('a', 2), ('b', 3)]", "S([b, a])", "S([])", "[]"],
        ["a", "2", "[2, 3]", "['a', 'b']", "'a'", "'ab'", "np.array([2, 3])", "tf.TensorShape([2, 3])"],
    ),
    "shape_or_none": (
        ["S([a, b, c])", "None"], ["S([c, b, a])", "[a, b, c]", "'a:2,b:3,c:4'"], ["a", "2", "[2, 3, 4]", "'a'", "S([c])"]
    ),
    "dim": (
        ["a"], ["b", "D('a', 2)", "('a', 2)"], ["'a'", "0", "None", "D('zz', 5)", "[a]", "D('a', 3)", "S([a])"]
    ),
    "new_dim": (["D('n', 2)"], ["('n', 2)", "D('n', 1)", "c"], ["'n'", "2", "None", "[c]", "a", "'n:2'"]),
    "dims": (["[a]"], ["(a,)", "S([a])", "[b, a]", "[]"], ["a", "'a'", "[2]", "None", "['a']"]),
    "dim_name": (["'a'"], ["'b'"], ["a", "0", "None", "'zz'", "''"]),
    "new_name": (["'n'"], ["'zz'", "'with space'", "'c'"], ["n_dim", "None", "3"]),
    "dtype": (
        ["tf.float32"], ["tf.int32", "tf.bfloat16", "tf.bool"], ["'nope'", "None", "3"]
    ),
    "number": (
        ["0.5", "2.0"], ["1", "0", "-1", "np.float32(0.25)", "np.int64(1)"], ["None", "'1'", "[1]", "x"]
    ),
    "int": (["1", "2"], ["0", "-1", "np.int64(1)", "True"], ["None", "'1'", "1.5", "[1]", "99"]),
    "size": (["3"], ["1", "6", "np.int64(3)"], ["None", "'3'", "2.5", "[3]"]),
    "bool": (["True", "False"], ["1", "0", "np.bool_(True)"], ["None", "'yes'", "[]"]),
    "name": (["'named'"], ["None", "'a/b'"], ["3", "b'named'", "[]"]),
    "fn": (["tf.sin"], ["lambda t: t * 2.0"], ["None", "'sin'", "3", "lambda: 1"]),
    "text": (["'hello'"], ["''", "'a b'"], ["None", "3", "['a']"]),
    "mesh": (["mesh"], [], ["None", "graph", "'mesh'", "impl"]),
    "mesh_shape": (
        ["S([rows, cols])"], ["'rows:2,cols:2'", "[rows, cols]", "''", "S([])", "[('rows', 2)]"], ["2", "'rows'", "['rows']", "[2, 2]", "rows"]
    ),
    "layout": (
        ["'a:rows'"],
        ["'a:rows,c:cols'", "''", "[('a', 'rows')]", "(('a', 'rows'), ('c', 'cols'))", "{('a', 'rows')}", "mtf.LayoutRules([('a', 'rows')])"],
        ["'a'", "3", "['a']", "[a]", "'a:rows:cols'", "'a:rows,a:cols'", "[('a', 1)]"],
    ),
    "none": (["None"], [], ["a", "'a'", "1"]),
    "variable": (["v"], ["v2"], ["x", "None", "'v'", "w"]),
    "pnum": (["0", "3"], ["1", "np.int64(2)", "-1"], ["'0'", "None", "99", "[0]"]),
    "axes": (["[0]"], ["[0, 1]", "[]", "(1,)"], ["0", "['rows']", "None", "[7]"]),
    "axis": (["0"], ["1"], ["'rows'", "7", "[0]"]),
    "reduction": (["'SUM'"], ["'MAX'", "'MIN'", "'AND'", "'OR'"], ["'sum'", "'MEAN'", "None", "3"]),
    "filter": (["(3, 3)"], ["[3, 3]", "(1, 1)", "(1, 3)"], ["3", "(3,)", "'33'", "(3, 3, 3)"]),
    "strides": (["(1, 1)"], ["[2, 2]", "(2, 2)", "(1, 2)"], ["2", "(1,)", "'11'", "(0, 0)"]),
    "padding": (["'SAME'"], ["'VALID'"], ["'same'", "None", "1", "'FULL'"]),
    "image": (["image"], ["mtf.to_float(image)"], ["x", "None", "s", "'image'"]),
    "volume": (["volume"], [], ["x", "None", "image"]),
    "step": (["tf.constant(7)"], ["7", "tf.constant(7.0)", "np.int64(7)", "0"], ["'7'", "None", "[7]"]),
    "steps": (["100"], ["1", "np.int64(100)", "1000000"], ["'100'", "None", "[100]"]),
    "initializer": (["tf.ones_initializer()"], ["tf.constant_initializer(2.0)", "None"], ["'ones'", "3", "np.ones([2, 3])"]),
    "activation": (["mtf.relu"], ["None", "[mtf.relu, mtf.tanh]"], ["'nope'", "3", "tf.nn.relu"]),
    "activation_name": (["'relu'"], ["'gelu'", "['gelu', 'linear']", "'linear'"], ["'nope'", "3", "mtf.relu"]),
    "variable_dtype": (
        ["vdtype"], ["mtf.VariableDType(tf.float32, tf.float32, tf.float32)"], ["tf.float32", "None", "'float32'", "(tf.float32,)"]
    ),
    "context": (["context"], [], ["None", "'context'"]),
    "sequence": (["sequence"], [], ["x", "None", "s"]),
    "id_list": (["[1, 2, 3]"], ["(1, 2)", "np.array([3, 4])", "[]"], ["None", "'123'", "7", "['a']"]),
}
