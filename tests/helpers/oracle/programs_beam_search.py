"""Programs: beam search and greedy decoding, with logits from a table."""

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import dims, table

BEAM_SEARCH, search = table("batch:x,vocab:y", "batch:y", "", gradients=False)

VOCAB = mtf.Dimension("vocab", 12)
LENGTH = mtf.Dimension("length", 6)
SEEN = mtf.Dimension("seen", 12)


def table_logits(p, scale=2.0):
    """Returns a function of logits, by the last id and by how often each id came before."""
    by_last = p.input("by_last", "batch:4,length:6,last:12,vocab:12") * scale
    by_seen = p.input("by_seen", "seen:12,vocab:12")
    last_dim = by_last.shape.dims[2]

    def logits_fn(step, ids, states):
        (seen,) = states
        last = mtf.gather(ids, step - 1, LENGTH)
        seen += mtf.one_hot(last, SEEN)
        rows = last.shape.dims
        logits = mtf.einsum(
            [mtf.one_hot(last, last_dim), mtf.one_hot(step, LENGTH), by_last],
            output_shape=rows + [VOCAB],
        )
        return logits + mtf.einsum([seen, by_seen], output_shape=rows + [VOCAB]), [seen]

    return logits_fn


def start(p, beam):
    rows = dims("batch:4") + ([mtf.Dimension("beam", beam)] if beam else [])
    ids = mtf.zeros(p.mesh, rows + [LENGTH], tf.int32)
    return ids, [mtf.zeros(p.mesh, rows + [SEEN])]


def searched(p, settings, beam=3, scale=2.0):
    """Returns ids and scores of a search for each of several settings."""
    outputs = {}
    for name, kwargs in settings.items():
        ids, states = start(p, beam)
        kwargs = {"alpha": 0.6, **kwargs}
        ids, scores = mtf.beam_search.beam_search(
            table_logits(p, scale), ids, states=states, **kwargs
        )
        outputs[f"{name}_ids"], outputs[f"{name}_scores"] = ids * 2, scores * 2.0
    return outputs


@search()
def beam_search_penalties(p):
    return searched(p, {"a0": {"alpha": 0.0}, "a06": {}, "a2": {"alpha": 2.0}})


@search()
def beam_search_to_the_end(p):
    return searched(p, {"all": {"stop_early": False}, "early": {}}, scale=0.5)


@search()
def beam_search_lengths(p):
    four = mtf.constant(p.mesh, 4, dtype=tf.int32)
    return searched(
        p, {"three": {"decode_length": 3}, "four": {"decode_length": four},
            "none": {"decode_length": 0}, "more": {"decode_length": 9}})  # fmt: skip


@search()
def beam_search_one_beam(p):
    return searched(p, {"one": {}, "other_eos": {"eos_id": 7}, "cpu": {"use_tpu": False}}, beam=1)


@search()
def topk_scores_and_seq(p):
    seq = p.input("seq", "batch:4,triple_beam:6,length:5", 9)
    scores, others = (p.input(n, "batch:4,triple_beam:6") for n in ("scores", "others"))
    flags = p.input("flags", "batch:4,triple_beam:6", "bool")
    best = mtf.beam_search.compute_topk_scores_and_seq(
        seq, scores, others, flags, mtf.Dimension("beam", 2), "grow"
    )
    ids, gathered, chosen, selector = best
    return {
        "ids": ids * 2, "gathered": gathered * 2.0, "flags": mtf.to_int32(chosen) * 2,
        "selector": selector * 2.0,
    }  # fmt: skip


@search()
def greedy_decode(p):
    outputs = {}
    forced = p.input("forced", "batch:4,length:6", 4)
    for name, kwargs in {"free": {}, "forced": {"forced_ids": forced}, "eos": {"eos_id": 3}}.items():
        ids, states = start(p, None)
        outputs[name] = 2 * mtf.beam_search.greedy_decode(
            table_logits(p), ids, initial_states=states, **kwargs
        )
    return outputs
