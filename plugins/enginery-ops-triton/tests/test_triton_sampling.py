"""Sampling without a sort keeps the tokens that sampling with one keeps, and draws what the noise says."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from drawn_in_float64 import drawn, kept_shares
from pairwise import HAS_CUDA
from triton_devices import DEVICES, chained

from enginery.api import SamplingTensors
from enginery.nn import reference_ops
from enginery_ops_triton.sampling import draw_rows, greedy_sample

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.parametrize("device", DEVICES)


def draws(uniform: torch.Tensor, device: str, **cut: float) -> SamplingTensors:
    """One row for each of the numbers, all with the same cuts."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | cut
    columns = [torch.full_like(uniform, value, dtype=torch.float32) for value in values.values()]
    drops = values["top_k"] > 0 or values["top_p"] < 1 or values["min_p"] > 0
    return SamplingTensors(table=torch.stack([*columns, uniform.float()]).to(device), most_kept=1 << 30, cut=drops)


def draw(logits: torch.Tensor, uniform: torch.Tensor, device: str, **cut: float) -> torch.Tensor:
    """One row of logits, drawn from with each of the numbers."""
    rows = logits.to(device).expand(len(uniform), -1)
    return draw_rows(rows, draws(uniform, device, **cut), dependent_launch=chained(device)).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 10), (1, 5), (3, 4096), (2, 10001)])
def test_greedy_is_the_first_of_the_largest(dtype: torch.dtype, shape: tuple[int, int], device: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(shape[0], shape[1] + 3).to(device=device, dtype=dtype)[:, : shape[1]]
    assert torch.equal(greedy_sample(logits, dependent_launch=chained(device)), logits.argmax(-1))


def test_greedy_takes_the_first_of_equals_across_blocks_and_always_a_token(device: str) -> None:
    logits = torch.zeros(4, 9000)
    logits[0, [4500, 8999]] = 1
    logits[1] = float("-inf")
    logits[2, 7000] = float("nan")
    logits[3, [3, 4]] = 1
    assert greedy_sample(logits.to(device), dependent_launch=chained(device)).tolist() == [4500, 0, 7000, 3]


CUTS = [
    {},
    {"temperature": 0.6},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10_000},
    {"top_p": 0.5},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"top_k": 7, "top_p": 0.7, "temperature": 1.5},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.1},
    {"top_k": 200, "top_p": 0.8, "min_p": 0.3, "temperature": 3.0},
    {"top_p": 0.9, "temperature": 20.0},
]


ROWS = 40 if HAS_CUDA else 12  # each takes the interpreter as long as the first
SIZES = [(torch.float32, 50), (torch.bfloat16, 4200), (torch.float16, 9000)]
MET = [(cut, *size) for cut in CUTS for size in SIZES]


@pytest.mark.parametrize(("cut", "dtype", "vocab_size"), MET, ids=str)
def test_tokens_are_those_of_the_noise(cut: dict[str, float], dtype: torch.dtype, vocab_size: int, device: str) -> None:
    torch.manual_seed(1)
    logits = (torch.randn(vocab_size) * 3).to(dtype)
    uniform = torch.rand(ROWS)
    wanted, apart = drawn(logits, uniform, **cut)
    clear = apart > 1e-4
    assert clear.sum() > 0.875 * ROWS
    assert torch.equal(draw(logits, uniform, device, **cut)[clear], wanted[clear])
    same = reference_ops.draw_rows(logits.expand(ROWS, -1), draws(uniform, "cpu", **cut))
    assert torch.equal(same[clear], wanted[clear])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_of_equal_logits_at_the_cut_the_first_are_kept(count: int, device: str) -> None:
    """Also where they are in several blocks, of which one has the last that is kept."""
    logits = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 1.0, -1.0])
    uniform = torch.rand(40, generator=torch.Generator().manual_seed(count))
    for cut in ({"top_k": 4}, {"top_p": 0.7}, {"top_k": 5, "top_p": 0.85}):
        kept = kept_shares(logits, **cut).nonzero().squeeze(1)
        assert set(draw(logits, uniform, device, **cut).tolist()) == set(kept.tolist())
        assert len(kept) == 4
    long = torch.full((20_000,), -9.0)
    equal = [100, 8191, 8192, 9000, 9001, 19_999]
    long[equal] = 1
    assert set(draw(long, uniform[: 8 * count], device, top_k=count).tolist()) == set(equal[:count])
    long[::128] = 1  # the first of each group: more groups than are looked at together
    first = set(sorted({*range(0, 20_000, 128), *equal})[: 40 * count])
    assert set(draw(long, torch.rand(ROWS), device, top_k=40 * count).tolist()) <= first


def test_a_row_without_heat_is_greedy(device: str) -> None:
    logits = torch.randn(100)
    assert draw(logits, torch.tensor([0.1, 0.9]), device, temperature=0.0, top_p=0.9).tolist() == [logits.argmax().item()] * 2


def test_banned_tokens_are_never_drawn_and_a_row_without_any_gives_a_token(device: str) -> None:
    logits = torch.full((64,), float("-inf"))
    logits[[3, 9]] = 1
    assert set(draw(logits, torch.rand(20), device, top_k=5, top_p=0.99).tolist()) == {3, 9}
    assert draw(torch.full((64,), float("-inf")), torch.tensor([0.5]), device, top_p=0.5).tolist() == [0]
    assert draw(torch.full((64,), float("nan")), torch.tensor([0.5]), device, top_p=0.5).tolist() == [0]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's of the interpreter, at inf - inf
@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9}], ids=str)
def test_infinite_logits_and_nan_are_taken(cut: dict[str, float], device: str) -> None:
    logits = torch.zeros(3, 9000)
    logits[0, [4500, 8999]] = float("inf")
    logits[1, 7000] = float("nan")
    logits[2, [5, 7]] = float("inf")
    asked = draws(torch.rand(3), device, **cut)
    assert draw_rows(logits.to(device), asked, dependent_launch=chained(device)).tolist() == [4500, 7000, 5]
    whole = dataclasses.replace(asked, table=asked.table.cpu(), most_kept=9000)
    assert reference_ops.draw_rows(logits, whole).tolist() == [4500, 7000, 5]


def test_rows_have_their_own_parameters(device: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 500).to(device)
    columns = [[0.0, 1.0, 1.0], [0, 1, 0], [1.0, 1.0, 0.0], [0.0] * 3, [0.9] * 3]
    own = SamplingTensors(table=torch.tensor(columns, device=device), most_kept=500, cut=True)
    assert torch.equal(draw_rows(logits, own, dependent_launch=chained(device)), logits.argmax(-1))
