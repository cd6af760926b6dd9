"""Draws calls of public names from the tables, the same in every process.

A table is text.  A line names what is called and its parameters with their kinds (see
`call_pools`), `name:kind` for one that must be given and `name=kind` for one that may be left out;
`{...}` after a kind is the value to use unless another is drawn:

    mtf.reduce_sum x:tensor output_shape=shape{[b]} reduced_dim=dim

Lines that begin with ">" are calls written by hand, which belong to the name above them.  "@" after
a name says what to call where that isn't the name itself: `Shape.resize_dimension @ x.shape.resize_dimension`.
"""

import random
import re
import zlib

from helpers.oracle.calls.call_pools import POOLS

PARAMETER = re.compile(r"(\*?\w+)([:=])(\w+)(?:\{([^}]*)\})?")
USUAL, UNUSUAL, WRONG = range(3)
# How many calls to draw for a name, beside those with usual arguments and by hand.
DRAWN = {UNUSUAL: 3, WRONG: 3}


class Parameter:
    """A parameter of the table: how it is given, its usual value and what else to try."""

    def __init__(self, name, sign, kind, value):
        self.name, self.optional = name.lstrip("*"), sign == "="
        self.positional = name.startswith("*") or not self.optional
        self.pools = POOLS[kind]
        self.value = value or self.pools[USUAL][0]


def parse(text):
    """Yields (name, callee or None, parameters, calls by hand) of a table."""
    entry = None
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith(">"):
            entry[3].append(line[1:].strip())
            continue
        if entry:
            yield entry
        name, _, rest = line.partition(" ")
        callee = name
        if rest.startswith("@ "):
            callee, _, rest = rest[2:].partition(" ")
        entry = (name, callee, [Parameter(*p) for p in PARAMETER.findall(rest)], [])
        if rest.strip() == "-":
            entry = (name, None, [], [])
    if entry:
        yield entry


def written(callee, parameters, values, keywords=False):
    """Returns the call's text: `values` by name of parameter; those left out have their default."""
    parts, named = [], keywords
    for p in parameters:
        if p.name not in values:
            named = True
        elif named or not p.positional:
            named = True
            parts.append(f"{p.name}={values[p.name]}")
        else:
            parts.append(values[p.name])
    return f"{callee}({', '.join(parts)})"


def draw(name, callee, parameters):
    """Returns the drawn calls of a name."""
    rng = random.Random(zlib.crc32(name.encode()))
    usual = {p.name: p.value for p in parameters if not p.optional}
    calls = [written(callee, parameters, usual)]
    optional = {p.name: p.value for p in parameters}
    if parameters:
        calls.append(written(callee, parameters, optional, keywords=True))
    for pool, count in DRAWN.items():
        choices = [(p, value) for p in parameters for value in p.pools[pool] if value != p.value]
        rng.shuffle(choices)
        seen = set()
        # As many parameters as there are, each once before any twice.
        choices.sort(key=lambda c: (c[0].name in seen, seen.add(c[0].name))[0])
        for p, value in choices[:count]:
            calls.append(
                written(callee, parameters, {**usual, p.name: value}, keywords=rng.random() < 0.3))
    return calls


def sample(text):
    """Returns {name: calls} of a table, each call once."""
    found = {}
    for name, callee, parameters, by_hand in parse(text):
        assert name not in found, f"{name} twice in a table"
        calls = [*(draw(name, callee, parameters) if callee else ()), *by_hand]
        found[name] = list(dict.fromkeys(calls))
    return found
