"""The table of seeded faults fits the package as it is; `run.py` seeds them."""

import os

import pytest
from fault import PACKAGE, ROOT
from faults import FAULTS
from run import arguments_of, failures

NUMBERS = {fault: number for number, fault in enumerate(FAULTS, 1)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{NUMBERS[fault]}-{fault.path}")
def test_fits(fault):
    """The old text is there once, the new one is Python, and the finders exist."""
    right = (ROOT / PACKAGE / fault.path).read_text(encoding="utf-8")
    wrong = fault.applied()
    assert compile(wrong, fault.path, "exec").co_code and wrong != right
    files = [word for word in arguments_of(fault.finders) if word.endswith(".py")]
    assert files and all(os.path.exists(ROOT / file) for file in files)


def test_rows_differ():
    assert len(NUMBERS) == len(FAULTS)
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)


def test_a_text_that_is_not_there_once():
    with pytest.raises(ValueError, match=r"/gradients.py has 'sums\[' \d times; it must be there"):
        FAULTS[0]._replace(path="ops/_control/gradients.py", old="sums[").applied()


def test_failures_are_read_from_what_pytest_prints():
    output = (
        "F\n"
        "FAILED tests/a/test_b.py::test_c[x:2,y - z-1] - AssertionError: no - not that\n"
        "FAILED tests/test_d.py::test_e\n"
        "ERROR tests/test_f.py::test_g - KeyError\n"
        "ERROR tests/test_h.py - SyntaxError\n"
    )
    assert failures(output)[1:] == ["tests/test_d.py::test_e", "tests/test_f.py::test_g"]
    assert failures(output)[0].startswith("tests/a/test_b.py::test_c[x:2,y")
