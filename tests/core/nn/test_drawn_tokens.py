"""Tokens drawn by noise: from the right distribution, by each row's own number alone, and of near distributions mostly the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import drawn_in_float64
import numpy as np
import pytest
import torch

from enginery.contracts.ops import SamplingTensors
from enginery.nn import reference_ops
from enginery.nn.reference_ops import draw_rows, exponentials, sample_rows

DrawFn = Callable[[torch.Tensor, SamplingTensors], torch.Tensor]
CUTS: list[dict[str, float]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
]


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def draws(uniform: torch.Tensor, *, vocab_size: int, **cut: float) -> SamplingTensors:
    """A row for each number."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | cut
    columns = [torch.full_like(uniform, value) for value in values.values()]
    return SamplingTensors(table=torch.stack([*columns, uniform]), most_kept=vocab_size, cut=not cut.keys() <= {"temperature"})


def drawn(logits: torch.Tensor, uniform: torch.Tensor, by: DrawFn = draw_rows, **cut: float) -> torch.Tensor:
    """From one row with each number, some at a time."""
    parts = uniform.split(max(1, 2**22 // len(logits)))
    return torch.cat([by(logits.expand(len(each), -1), draws(each, vocab_size=len(logits), **cut)) for each in parts])


def test_the_noise_is_that_of_its_formula_in_float64() -> None:
    uniform = torch.cat([numbers(50), torch.tensor([0.0, 1.0, 2.0**-53, 1 - 2.0**-24])])
    wanted = drawn_in_float64.exponentials(uniform, 5000)
    found = exponentials(uniform, 5000).double().numpy()
    assert found.min() > 0
    usual = wanted < 8
    assert np.abs(found / wanted - 1)[usual].max() < 1e-4
    assert np.abs(found / wanted - 1)[wanted < 1].max() < 1e-6
    assert found.max() < 17


def test_numbers_that_differ_by_one_bit_and_neighbouring_tokens_have_unrelated_noise() -> None:
    start = numbers(1)
    bits = (start.view(torch.int32) ^ (1 << torch.arange(31, dtype=torch.int32))).view(torch.float32)
    noise = exponentials(torch.cat([start, bits]), 20_000)
    related = torch.corrcoef(noise) - torch.eye(32)
    assert related.abs().max() < 5 / 20_000**0.5
    along = torch.stack([torch.corrcoef(torch.stack([row[:-1], row[1:]]))[0, 1] for row in noise])
    assert along.abs().max() < 5 / 20_000**0.5


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_tokens_are_those_of_the_noise_and_come_as_often_as_they_should(cut: dict[str, float]) -> None:
    logits = torch.randn(60, generator=torch.Generator().manual_seed(1)) * 1.5
    uniform = numbers(40_000)
    found = drawn(logits, uniform, **cut)
    wanted, apart = drawn_in_float64.drawn(logits, uniform, **cut)
    assert torch.equal(found[apart > 1e-4], wanted[apart > 1e-4])
    assert (apart > 1e-4).float().mean() > 0.99
    shares = drawn_in_float64.kept_shares(logits, **cut)  # type: ignore[arg-type]
    counts, expected = found.bincount(minlength=60).double(), shares * len(uniform)
    assert not counts[shares == 0].any()
    usual = expected > 20
    chi_square = ((counts - expected).square() / expected)[usual].sum()
    degrees = float(usual.sum())
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_a_large_vocabulary_gives_each_part_its_share() -> None:
    logits = -1.1 * torch.arange(1, 32_001).float().log()
    uniform = numbers(2000)
    found = drawn(logits, uniform)
    shares = logits.double().softmax(0)
    edges = [0, 1, 3, 10, 40, 200, 1000, 5000, 32_000]
    for first, end in itertools.pairwise(edges):
        share = shares[first:end].sum().item()
        count = ((found >= first) & (found < end)).sum().item()
        assert abs(count - 2000 * share) < 5 * (2000 * share) ** 0.5


def test_two_near_distributions_of_a_large_vocabulary_mostly_have_the_same_token() -> None:
    """Where a draft model guesses: at best as often as 1 - total variation. By the order of indices it is far less."""
    random, agreed, by_order, best = torch.Generator().manual_seed(2), 0.0, 0.0, 0.0
    for _ in range(4):
        logits = -1.6 * torch.arange(1, 32_001).float().log() + torch.randn(32_000, generator=random) / 2
        logits = logits[torch.randperm(32_000, generator=random)]
        near = logits + 0.3 * torch.randn(32_000, generator=random)
        best += torch.minimum(logits.softmax(0), near.softmax(0)).sum().item()
        uniform = torch.rand(600, generator=random)
        agreed += (drawn(logits, uniform) == drawn(near, uniform)).float().mean().item()
        by_order += (drawn(logits, uniform, sample_rows) == drawn(near, uniform, sample_rows)).float().mean().item()
    assert agreed > 0.9 * best
    assert by_order < 0.8 * best


def test_rounded_logits_seldom_change_a_token() -> None:
    random = torch.Generator().manual_seed(3)
    logits = -1.6 * torch.arange(1, 32_001).float().log()[torch.randperm(32_000, generator=random)]
    near = logits + 0.01 * torch.randn(32_000, generator=random)
    uniform = torch.rand(600, generator=random)
    assert (drawn(logits, uniform) != drawn(near, uniform)).float().mean() < 0.03


@pytest.mark.parametrize("cut", [{}, {"top_k": 9}, {"top_p": 0.7}])
def test_a_rows_token_depends_on_no_other_row(cut: dict[str, float]) -> None:
    logits = torch.randn(12, 500, generator=torch.Generator().manual_seed(4))
    uniform = numbers(12)
    together = draw_rows(logits, draws(uniform, vocab_size=500, **cut))
    for row in range(12):
        alone = draw_rows(logits[row : row + 1], draws(uniform[row : row + 1], vocab_size=500, **cut))
        assert alone.item() == together[row].item()
    order = torch.randperm(12)
    assert torch.equal(draw_rows(logits[order], draws(uniform[order], vocab_size=500, **cut)), together[order])


@pytest.mark.parametrize("cut", [{}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.1}])
def test_infinite_logits_and_nan_are_taken_and_a_row_of_nothing_has_a_token(cut: dict[str, float]) -> None:
    logits = torch.zeros(4, 50)
    logits[0, [7, 20]] = float("inf")
    logits[1] = float("-inf")
    logits[2, 30] = float("nan")
    logits[3] = float("-inf")
    logits[3, 11] = -1e30
    assert draw_rows(logits, draws(numbers(4), vocab_size=50, **cut)).tolist() == [7, 0, 30, 11]


def test_a_row_without_heat_takes_its_largest_beside_rows_with_it() -> None:
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(5)).expand(2, -1).contiguous()
    asked = draws(numbers(2), vocab_size=100, top_k=3)
    asked.table[0, 1] = 0.0
    assert draw_rows(logits, asked)[1] == reference_ops.greedy(logits)[1]
