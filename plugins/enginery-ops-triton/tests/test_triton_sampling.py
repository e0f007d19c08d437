"""Sampling without a sort keeps the tokens that sampling with one keeps, and draws them in proportion."""

from __future__ import annotations

import pytest
import torch
from pairwise import HAS_CUDA
from triton_devices import DEVICES, chained

from enginery.api import SamplingTensors
from enginery.nn import reference_ops
from enginery_ops_triton.sampling import greedy_sample, sample_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.parametrize("device", DEVICES)


def kept_weights(
    logits: torch.Tensor, *, temperature: float = 1, top_k: int = 0, top_p: float = 1, min_p: float = 0
) -> torch.Tensor:
    """What each token weighs after the cuts, by a stable sort in float64: [V]."""
    values, order = (logits.double() / temperature).sort(descending=True, stable=True)
    weights = values.softmax(-1)
    if top_k:
        weights[top_k:] = 0
        weights /= weights.sum()
    before = weights.cumsum(-1) - weights
    dropped = (before >= top_p) | (weights < weights[0] * min_p)
    dropped[0] = False
    return torch.zeros_like(weights).scatter(0, order, weights.masked_fill(dropped, 0))


def draws(uniform: torch.Tensor, device: str, **cut: float) -> SamplingTensors:
    """One row for each of the uniform numbers, all with the same cuts."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | cut
    columns = [torch.full_like(uniform, value, dtype=torch.float32) for value in values.values()]
    drops = values["top_k"] > 0 or values["top_p"] < 1 or values["min_p"] > 0
    return SamplingTensors(table=torch.stack([*columns, uniform.float()]).to(device), most_kept=1 << 30, cut=drops)


def draw(logits: torch.Tensor, uniform: torch.Tensor, device: str, **cut: float) -> torch.Tensor:
    """One row of logits, drawn from with each of the uniform numbers."""
    rows = logits.to(device).expand(len(uniform), -1)
    return sample_rows(rows, draws(uniform, device, **cut), dependent_launch=chained(device)).cpu()


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
]


SIZES = [(torch.float32, 50), (torch.bfloat16, 300), (torch.float16, 4200)]
# Interpreted, each cut meets one dtype; on a GPU all.
MET = [(cut, *size) for place, cut in enumerate(CUTS) for size in (SIZES if HAS_CUDA else [SIZES[place % len(SIZES)]])]


@pytest.mark.parametrize(("cut", "dtype", "vocab_size"), MET, ids=str)
def test_each_kept_token_has_its_share_of_the_numbers(
    cut: dict[str, float], dtype: torch.dtype, vocab_size: int, device: str
) -> None:
    torch.manual_seed(1)
    logits = (torch.randn(vocab_size) * 3).to(dtype)
    weights = kept_weights(logits, **cut)
    shares = weights / weights.sum()
    wide_enough = (shares > 1e-3).nonzero().squeeze(1)[:6]
    middle = (shares.cumsum(0) - shares / 2)[wide_enough]
    assert draw(logits, middle, device, **cut).tolist() == wide_enough.tolist()
    same = reference_ops.sample_rows(logits.expand(len(middle), -1), draws(middle, "cpu", **cut))
    assert same.tolist() == wide_enough.tolist()
    ends = draw(logits, torch.tensor([0.0, 1.0]), device, **cut).tolist()
    assert ends == [weights.nonzero()[0].item(), weights.nonzero()[-1].item()]


def test_of_equal_logits_at_the_cut_the_first_are_kept(device: str) -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 1.0, -1.0])
    uniform = torch.arange(0, 1, 1 / 8)
    for cut in ({"top_k": 4}, {"top_p": 0.7}, {"top_k": 5, "top_p": 0.85}):
        kept = set(kept_weights(logits, **cut).nonzero().squeeze(1).tolist())
        assert set(draw(logits, uniform, device, **cut).tolist()) == kept
        assert len(kept) == 4


def test_a_row_without_heat_is_greedy(device: str) -> None:
    logits = torch.randn(100)
    assert draw(logits, torch.tensor([0.1, 0.9]), device, temperature=0.0, top_p=0.9).tolist() == [logits.argmax().item()] * 2


def test_banned_tokens_are_never_drawn_and_a_row_without_any_gives_a_token(device: str) -> None:
    logits = torch.full((64,), float("-inf"))
    logits[[3, 9]] = 1
    assert draw(logits, torch.tensor([0.0, 0.49, 0.51, 1.0]), device, top_k=5, top_p=0.99).tolist() == [3, 3, 9, 9]
    assert draw(torch.full((64,), float("nan")), torch.tensor([0.5]), device, top_p=0.5).tolist() == [0]


def test_rows_have_their_own_parameters(device: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 500).to(device)
    columns = [[0.0, 1.0, 1.0], [0, 1, 0], [1.0, 1.0, 0.0], [0.0] * 3, [0.9] * 3]
    own = SamplingTensors(table=torch.tensor(columns, device=device), most_kept=500, cut=True)
    assert torch.equal(sample_rows(logits, own, dependent_launch=chained(device)), logits.argmax(-1))
