"""Routing of tokens to experts in plain NumPy, one token after the other."""

import numpy as np


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


class Places:
    """Places for tokens in experts, filled in the order of calls."""

    def __init__(self, group, experts, capacity):
        self.combine = np.zeros([group, experts, capacity])
        self.taken = [0] * experts

    def give(self, token, expert, gate):
        if self.taken[expert] >= self.combine.shape[-1]:
            return False
        self.combine[token, expert, self.taken[expert]] = gate
        self.taken[expert] += 1
        return True


def ranked(gates):
    """Returns the experts of each token, best first."""
    return np.argsort(-gates, axis=-1, kind="stable")


def top_n(gates, importance, capacity, n, sent):
    """Also top_2: `sent` says of a normalized gate whether a later choice is sent."""
    places, order = Places(*gates.shape, capacity), ranked(gates)
    for rank in range(n):
        for token, experts in enumerate(order):
            total = gates[token, experts[:n]].sum() if n > 1 else 1.0
            gate = gates[token, experts[rank]] / total
            if importance[token] > 0 and (rank == 0 or sent(gate)):
                places.give(token, experts[rank], gate)
    return places.combine


def top_2(gates, importance, capacity, sent):
    """Tokens of importance below 1 go to their best expert, in the second pass."""
    places, order = Places(*gates.shape, capacity), ranked(gates)
    for token, (first, second, *_) in enumerate(order):
        if importance[token] == 1:
            places.give(token, first, gates[token, first] / gates[token, [first, second]].sum())
    for token, (first, second, *_) in enumerate(order):
        gate = gates[token, second] / gates[token, [first, second]].sum()
        if importance[token] == 1 and sent(gate):
            places.give(token, second, gate)
        elif 0 < importance[token] < 1 and sent(1.0):
            places.give(token, first, 1.0)
    return places.combine


def no_token_left_behind(gates, importance, capacity, rounds):
    """With one round it is a switch."""
    places, order = Places(*gates.shape, capacity), ranked(gates)
    left = [t for t in range(len(gates)) if importance[t] == 1]
    for rank in range(rounds):
        left = [t for t in left if not places.give(t, order[t, rank], gates[t, order[t, rank]])]
    return places.combine


def keep_best(gates, importance, capacity):
    """A switch in which an expert takes the tokens with the highest gates: [experts, capacity, group]."""
    group, experts = gates.shape
    combine, order = np.zeros([experts, capacity, group]), ranked(gates)
    for expert in range(experts):
        tokens = [t for t in range(group) if order[t, 0] == expert and importance[t] == 1]
        for place, t in enumerate(sorted(tokens, key=lambda t: -gates[t, expert])[:capacity]):
            combine[expert, place, t] = gates[t, expert]
    return combine


def expert_choice(logits, importance, capacity):
    """Experts take the tokens that have the highest gates: [experts, capacity, group]."""
    group, experts = logits.shape
    gates = softmax(np.where(importance[:, None] > 0, logits, -np.inf), 0)
    combine, count = np.zeros([experts, capacity, group]), np.zeros(group)
    chosen = [np.argsort(-gates[:, e], kind="stable")[:capacity] for e in range(experts)]
    for tokens in chosen:
        count[tokens] += 1
    for expert, tokens in enumerate(chosen):
        for place, t in enumerate(tokens):
            combine[expert, place, t] = gates[t, expert] / count[t]
    return combine
