"""The texts of errors: what is not defined for complex numbers, or has others beside them."""

import pytest
import tensorflow.compat.v1 as tf
from helpers.errors import After, check_building
from helpers.world import A, B

import mesh_tensorflow as mtf
from mesh_tensorflow._core.errors import NoValueError, WrongTypeError

V, T = ValueError, TypeError


def _complex(call):
    """Returns a call of a complex Tensor."""
    return After(lambda w: w.tensor([A, B], tf.complex64), lambda w, z: call(z))


def _undefined(name, call):
    text = (
        rf"^{name} is not defined for complex numbers, such as those of import_\d:0 "
        r"Shape\[a=8, b=16\] complex64\. Real are mtf\.abs\(x\), mtf\.real"
    )
    return _complex(call), WrongTypeError, text


_sigmoid_losses = mtf.layers.sigmoid_cross_entropy_with_logits

BUILD = {
    **{
        name: _undefined(name, fn)
        for name, fn in [
            ("less", lambda z: z < 1.0),
            ("less_equal", lambda z: z <= 1.0),
            ("greater", lambda z: z > z),
            ("greater_equal", lambda z: z >= z),
            ("mod", lambda z: z % 2.0),
            ("floordiv", lambda z: z // 2.0),
            ("maximum", lambda z: mtf.maximum(z, z)),
            ("minimum", lambda z: mtf.minimum(z, 0.0)),
            ("reduce_max", mtf.reduce_max),
            ("reduce_min", mtf.reduce_min),
            ("relu", mtf.relu),
            ("leaky_relu", mtf.leaky_relu),
            ("elu", mtf.elu),
            ("selu", mtf.selu),
            ("gelu", mtf.gelu),
            ("swish", mtf.swish),
            ("softplus", mtf.softplus),
            ("sign", mtf.sign),
            ("softmax", lambda z: mtf.softmax(z, B)),
            ("reduce_logsumexp", lambda z: mtf.reduce_logsumexp(z, B)),
            ("sort", lambda z: mtf.sort(z, B)),
            ("argsort", lambda z: mtf.argsort(z, B)),
            ("layer_norm", lambda z: mtf.layers.layer_norm(z, B)),
            ("batch_norm", lambda z: mtf.layers.batch_norm(z, True, 0.9)),
            ("corr", lambda z: mtf.layers.corr(z, B)),
            ("sigmoid_cross_entropy_with_logits", lambda z: _sigmoid_losses(z, z)),
            ("top_k", lambda z: mtf.top_k(z, B, mtf.Dimension("k", 2))),
        ]
    },
    "argmax": _undefined("top_k", lambda z: mtf.argmax(z, B)),
    "parts": (
        lambda w: mtf.complex(w.i, w.i),
        WrongTypeError,
        r"complex: the parts .* float32 or float64, .* Shape\[a=8\] int32. Write mtf.cast",
    ),
    "parts_differ": (
        After(lambda w: w.tensor([A, B], tf.float64), lambda w, y: mtf.complex(w.x, y)),
        V,
        "complex: dtypes must be equal: .*float32.*float64.*mtf.cast",
    ),
    "angle": (lambda w: mtf.angle(w.i), WrongTypeError, r"angle: the parts of complex numbers"),
    "number_beside": (
        lambda w: w.x * 1j,
        T,
        r"complex numbers stand beside import:0 .* float32.*write mtf.cast\(x, tf.complex64\)",
    ),
    "constant": (
        lambda w: mtf.constant(w.mesh, 1j, [A]),
        WrongTypeError,
        r"constant: 1j is complex, and the dtype is float32; write dtype=tf.complex64",
    ),
    "random": (
        lambda w: mtf.random_normal(w.mesh, [A], dtype=tf.complex64),
        WrongTypeError,
        r"random values of dtype complex64: .* Write mtf.complex\(mtf.random_normal",
    ),
}


@pytest.mark.parametrize("name", BUILD)
def test_building(name):
    check_building(*BUILD[name])


def test_number():
    z = mtf.constant(mtf.Mesh(mtf.Graph(), "mesh"), 1 + 2j, dtype=tf.complex64)
    assert complex(z) == 1 + 2j
    for kind in float, int:
        text = rf"{kind.__name__}\(x\): .*complex64. Write complex\(x\), or .*mtf.real\(x\)"
        with pytest.raises(NoValueError, match=text):
            kind(z)
