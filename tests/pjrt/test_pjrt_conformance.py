"""Cases of the conformance suite, compiled by XLA: for four devices of JAX, or one of TensorFlow."""

import pytest

from mesh_tensorflow.testing.conformance import check, compiled, pjrt

NOT_KNOWN = "XLA compiles the gradient of a loop for a known number of iterations at most"
OF_XLA = "No registered 'Cumsum' OpKernel"  # for complex numbers


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(
    "only",
    [
        "conv2d_stride",
        "gather_shared",
        "slicewise_int_input",
        "while_max",
        "complex_functions",
        "halo_exchange_4",
    ],
)
def test_a_part_conforms(only):
    results = [r for make_impl in (compiled, pjrt) for r in check(make_impl, only, 1)]
    assert results and not [r for r in results if r.error]


@pytest.mark.every
@pytest.mark.slow
@pytest.mark.parametrize("make_impl", [compiled, pjrt])
def test_all_that_xla_compiles_conforms(make_impl):
    results = list(check(make_impl, "", 1))
    errors = {r.name: r.error for r in results if r.error}
    loops = {name for name, error in errors.items() if NOT_KNOWN in error}
    assert len(results) > 500 and all("while" in name or "loop" in name for name in loops)
    rest = {name: error for name, error in errors.items() if name not in loops}
    assert not [name for name, e in rest.items() if OF_XLA not in e], rest
