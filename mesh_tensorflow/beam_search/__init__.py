"""Decoding: beam search, and greedy or sampled decoding one position at a time."""

from mesh_tensorflow.beam_search._search import (
    EOS_ID,
    INF,
    beam_search,
    compute_topk_scores_and_seq,
    greedy_decode,
)

__all__ = ["EOS_ID", "INF", "beam_search", "compute_topk_scores_and_seq", "greedy_decode"]
