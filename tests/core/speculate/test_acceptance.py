"""Tokens told are the target's own draws, whatever the drafts; their distribution is the target's, and planted defects show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairwise import EVERYTHING

from enginery.contracts.ops import SamplingTensors
from enginery.nn.reference_ops import draw_rows
from enginery.speculate.acceptance import accept
from enginery.worker.sampling import uniform


@st.composite
def verifications(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """sampled, tokens, parents and num_drafts of a few trees over three tokens."""
    num_requests, num_rows = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    rows = st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows)
    sampled, tokens = (torch.tensor([draw(rows) for _ in range(num_requests)]) for _ in range(2))
    parents = torch.tensor([[0, *(draw(st.integers(0, row - 1)) for row in range(1, num_rows))] for _ in range(num_requests)])
    num_drafts = torch.tensor([draw(st.integers(0, num_rows - 1)) for _ in range(num_requests)])
    return sampled, tokens, parents, num_drafts


@given(verifications())
def test_a_walk_by_hand_finds_the_same(given_: tuple[torch.Tensor, ...]) -> None:
    sampled, tokens, parents, num_drafts = given_
    path, counts = accept(sampled, tokens, parents, num_drafts)
    for request in range(len(tokens)):
        node, walked = 0, [0]
        while True:
            children = [
                row
                for row in range(1, int(num_drafts[request]) + 1)
                if parents[request, row] == node and row != node and tokens[request, row] == sampled[request, node]
            ]
            if not children:
                break
            node = children[0]
            walked.append(node)
        assert int(counts[request]) == len(walked) - 1
        assert path[request, : len(walked)].tolist() == walked
        assert set(path[request, len(walked) :].tolist()) <= {node}


@given(verifications())
def test_no_step_is_walked_behind_the_longest_way(given_: tuple[torch.Tensor, ...]) -> None:
    sampled, tokens, parents, num_drafts = given_
    depths = torch.zeros_like(parents)
    for row in range(1, parents.shape[1]):
        depths[:, row] = depths.gather(1, parents[:, row, None]).squeeze(1) + 1
    shorter = accept(sampled, tokens, parents, num_drafts, depth=int(depths.max()))
    for one, other in zip(shorter, accept(sampled, tokens, parents, num_drafts), strict=True):
        assert torch.equal(one, other)


@given(verifications())
def test_a_chain_is_a_tree_whose_parents_are_the_rows_before(given_: tuple[torch.Tensor, ...]) -> None:
    sampled, tokens, _, num_drafts = given_
    chain = (torch.arange(tokens.shape[1]) - 1).clamp(min=0).expand_as(tokens)
    for one, other in zip(accept(sampled, tokens, None, num_drafts), accept(sampled, tokens, chain, num_drafts), strict=True):
        assert torch.equal(one, other)


DEPTH = 4
NUM_DRAWN = 100_000 if EVERYTHING else 30_000


def target(prefix: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits [B, V] of the token after each prefix [B, L]: some function of all of it."""
    weight = torch.arange(1, prefix.shape[1] + 1)
    mixed = (prefix * weight * 7919).sum(1, keepdim=True) % 1009
    return torch.sin(mixed * 0.37 + torch.arange(vocab_size) * 1.7) * 1.5


def draw(logits: torch.Tensor, seeds: np.ndarray, position: int) -> torch.Tensor:
    """As a decoding row is sampled at that position."""
    numbers = uniform(seeds, np.full(len(seeds), position, np.uint64))
    table = torch.tensor(np.stack([np.ones(len(seeds)), np.zeros(len(seeds)), np.ones(len(seeds)), np.zeros(len(seeds)), numbers]))
    return draw_rows(logits, SamplingTensors(table=table.float(), most_kept=logits.shape[1], cut=False))


def told_of(vocab_size: int, branches: int, defect: str = "", *, same: bool = False) -> torch.Tensor:
    """The first DEPTH tokens of many requests, each from verifications of trees with random drafts: [B, DEPTH].

    same: a draft of the chain is drawn from a model that is nearly the target, with the number that the target draws with there.
    """
    seeds = np.arange(NUM_DRAWN, dtype=np.uint64)
    random = torch.Generator().manual_seed(5)
    told = torch.zeros(NUM_DRAWN, 1, dtype=torch.int64)  # all begin with token 0
    # A comb: a chain of DEPTH drafts, and beside each of its rows more guesses.
    chain = list(range(0, DEPTH * branches, branches))
    parents = [0] + [0 if depth == 0 else 1 + chain[depth - 1] for depth in range(DEPTH) for _ in range(branches)]
    tokens = torch.cat([told, torch.randint(vocab_size, (NUM_DRAWN, DEPTH * branches), generator=random)], 1)
    sampled = torch.empty_like(tokens)
    for row in range(tokens.shape[1]):
        line, node = [], row
        while node:
            line.append(node)
            node = parents[node]
        if same and row - 1 in chain:
            before = torch.cat([told, tokens[:, line[:0:-1]]], 1)
            tokens[:, row] = draw(0.8 * target(before, vocab_size), seeds, len(line))
        seen = torch.cat([told, tokens[:, line[::-1]]], 1)
        sampled[:, row] = draw(target(seen, vocab_size), seeds, len(line) + 1)
    path, counts = accept(sampled, tokens, torch.tensor(parents).expand_as(tokens), torch.full((NUM_DRAWN,), DEPTH * branches))
    values = sampled.gather(1, path)
    out = torch.full((NUM_DRAWN, DEPTH), -1)
    for place in range(DEPTH):
        is_told = place <= counts
        out[is_told, place] = values[is_told, place]
        if defect == "the draft is told where it was refused":
            first_draft = tokens.gather(1, (path[:, [place]] * branches + 1).clamp(max=tokens.shape[1] - 1)).squeeze(1)
            refused = place == counts
            out[refused, place] = first_draft[refused]
        if defect == "a refused token is drawn again with the same noise":
            refused = (place == counts) & (counts < DEPTH)
            seen = torch.cat([told, out[:, :place].clamp(min=0)], 1)
            logits = target(seen, vocab_size).scatter(1, values[:, [place]], -torch.inf)
            out[refused, place] = draw(logits, seeds, place + 1)[refused]
    return out


def chi_square(told: torch.Tensor, vocab_size: int) -> float:
    """How many standard deviations the first told tokens and pairs are from the target's distribution; about 0 if they fit."""
    worst = 0.0
    first = Counter(told[:, 0].tolist())
    share = target(torch.zeros(1, 1, dtype=torch.int64), vocab_size).softmax(1)[0].double()
    worst = max(worst, deviation(first, share, len(told)))
    for token in range(min(vocab_size, 3)):
        seconds = told[(told[:, 0] == token) & (told[:, 1] >= 0), 1]
        if len(seconds) > 1000:
            share = target(torch.tensor([[0, token]]), vocab_size).softmax(1)[0].double()
            worst = max(worst, deviation(Counter(seconds.tolist()), share, len(seconds)))
    return worst


def deviation(counted: Counter[int], share: torch.Tensor, total: int) -> float:
    statistic = sum((counted[token] - total * p) ** 2 / (total * p) for token, p in enumerate(share.tolist()))
    freedom = len(share) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("branches", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("vocab_size", [3, 50])
def test_what_is_told_is_plain_decoding_and_has_the_target_s_distribution(vocab_size: int, branches: int) -> None:
    told = told_of(vocab_size, branches)
    seeds, plain = np.arange(NUM_DRAWN, dtype=np.uint64), torch.zeros(NUM_DRAWN, 1, dtype=torch.int64)
    for position in range(1, DEPTH + 1):
        plain = torch.cat([plain, draw(target(plain, vocab_size), seeds, position)[:, None]], 1)
    is_told = told >= 0
    assert torch.equal(told[is_told], plain[:, 1:][is_told])
    assert is_told[:, 0].all()
    assert chi_square(plain[:, 1:], vocab_size) < 5


@pytest.mark.parametrize("vocab_size", [3, 50])
def test_drafts_drawn_with_the_target_s_own_number_change_no_distribution(vocab_size: int) -> None:
    told, random = (told_of(vocab_size, 1, same=same) for same in (True, False))
    first = chi_square(told, vocab_size)
    assert first < 5
    assert torch.equal(told[:, 0], random[:, 0])
    assert (told >= 0).sum() > 1.3 * (random >= 0).sum(), "they are right far more often"
    redrawn = told_of(vocab_size, 1, "a refused token is drawn again with the same noise", same=True)
    assert chi_square(redrawn, vocab_size) > 20


@pytest.mark.parametrize("branches", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("vocab_size", "defect"),
    [
        *((size, "the draft is told where it was refused") for size in (3, 50)),
        (3, "a refused token is drawn again with the same noise"),  # of 50 even ones the second best is as the best
    ],
)
def test_the_usual_mistakes_change_the_distribution(vocab_size: int, defect: str, branches: int) -> None:
    find: Callable[[torch.Tensor, int], float] = chi_square
    assert find(told_of(vocab_size, branches, defect), vocab_size) > 20


@pytest.mark.parametrize("vocab_size", [3, 50])
def test_siblings_that_are_each_drawn_anew_change_the_distribution(vocab_size: int) -> None:
    """The usual mistake with trees: of several guesses for one place the first that a draw of its own meets is told."""
    seeds, random = np.arange(NUM_DRAWN, dtype=np.uint64), torch.Generator().manual_seed(5)
    first = target(torch.zeros(NUM_DRAWN, 1, dtype=torch.int64), vocab_size)
    siblings = torch.randint(2, (NUM_DRAWN, 3), generator=random)
    told, is_told = draw(first, seeds, 1), torch.zeros(NUM_DRAWN, dtype=torch.bool)
    for place in range(3):
        drawn = draw(first, seeds, 1 + place)
        meets = ~is_told & (drawn == siblings[:, place])
        told[meets], is_told = drawn[meets], is_told | meets
    right = draw(first, seeds, 1)
    assert chi_square(torch.stack([right, torch.full_like(right, -1)], 1), vocab_size) < 5
    assert chi_square(torch.stack([told, torch.full_like(told, -1)], 1), vocab_size) > 20
