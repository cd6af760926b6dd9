"""The sequence-to-sequence example: it learns to sort, and says what is wrong."""

import itertools
import re
import sys

import pytest
from helpers import noise, processes
from helpers.paths import EXAMPLES

sys.path.append(str(EXAMPLES))

import transformer_seq2seq as example

SCRIPT = EXAMPLES / "transformer_seq2seq.py"


def run(*flags):
    done = processes.run(SCRIPT, *flags)
    assert done.returncode == 0, done.stderr
    noise.check(done)
    return done.stdout


@pytest.mark.slow
def test_quick_form_learns_to_sort():
    text = run("--quick")
    match = re.search(r"^exact match ([\d.]+)% of 512 held-out strings", text, re.M)
    assert float(match[1]) >= 100 * example.QUICK_MATCH
    pairs = re.findall(r"^ *(\d+) -> (\d+) +(right|wrong)$", text, re.M)
    assert len(pairs) == example.SHOWN
    assert all(("".join(sorted(a)) == b) == (said == "right") for a, b, said in pairs)


@pytest.mark.slow
def test_reverse_in_simd():
    text = run(
        "--task=reverse",
        "--batch_size=16",
        "--gin_param=num_layers = 1",
        "--train_steps=20",
        "--mesh_impl=simd",
        "--mesh_shape=all:2",
        "--layout=batch:all",
    )
    assert re.search(r"^step 20/20  held out: [\d.]+% of digits right", text, re.M)
    assert re.search(r"^exact match [\d.]+% of 128 held-out strings", text, re.M)


def test_strings_are_held_out():
    few, many = ({*itertools.islice(example.strings(0, held), 3000)} for held in (True, False))
    assert not few & many
    assert {len(text) for text in few} == set(range(4, 13))
    first, second = (list(itertools.islice(example.strings(7, False), 9)) for _ in "ab")
    assert first == second


def test_mistakes():
    with pytest.raises(ValueError, match="--task is 'add': choose one of sort, reverse"):
        example.run(example.Options(task="add"))
