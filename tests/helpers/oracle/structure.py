"""What a program is made of: the dimensions of its variables, what its layers ask of a Context."""

import contextlib
import sys

_TRANSFORMER = "mesh_tensorflow.transformer.transformer"
# Layers, models and embeddings: what users put into a model, or call themselves.
_PARTS = ("call", "hidden_to_logits", "_call_internal")

# {class of layer: what the classic's reads of a Context}: nothing else is there then. Or None.
ALLOWED = None


def dimensions(graph):
    """Returns the names of the dimensions of each variable, optimizer slots included."""
    return {v.name: " ".join(v.outputs[0].shape.dimension_names) for v in graph.all_variables}


def of(program, case):
    """Returns (what a program returns, its structure)."""
    with context_reads() as reads:
        outputs = dict(program.fn(case))
    return outputs, {"dimensions": dimensions(case.graph), "reads": reads}


def _part(frame):
    """Returns the class of the innermost layer, model or embedding that runs, or None."""
    while frame is not None:
        kind = type(frame.f_locals.get("self"))
        if any(hasattr(kind, name) for name in _PARTS) and kind.__module__.startswith("mesh_"):
            return kind.__name__
        frame = frame.f_back
    return None


@contextlib.contextmanager
def context_reads():
    """Yields a dictionary; notes in it, by class of layer, what is read of Contexts meanwhile.

    What a Context reads of itself is not noted: another object may do without.
    """
    reads = {}
    module = sys.modules.get(_TRANSFORMER)
    if module is None:
        yield reads
        return

    def noting(self, name):
        frame = sys._getframe(1)
        # By a method, or by a function that the method shares with others.
        of_itself = any(f.f_locals.get("self") is self for f in (frame, frame.f_back))
        if not of_itself and not name.startswith("__"):
            part = _part(frame)
            if part is not None:
                reads.setdefault(part, set()).add(name)
                if ALLOWED is not None and name not in ALLOWED.get(part, [name]):
                    raise AttributeError(f"{part}: a context without {name}")
        return object.__getattribute__(self, name)

    context = module.Context
    context.__getattribute__ = noting
    try:
        yield reads
    finally:
        del context.__getattribute__
