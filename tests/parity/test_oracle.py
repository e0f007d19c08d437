"""The check by one forward pass: it finds the same tokens as one pass for each, whatever it is given as a guess."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from parity.engine_driver import assert_greedy
from parity.oracle import FAMILIES, NUM_GREEDY, GreedyReference, Oracle


@pytest.fixture
def llama(write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle("llama", FAMILIES["llama"])


@pytest.fixture(scope="module")
def told() -> list[list[int]]:
    """For two prompts, transformers' tokens in one forward pass for each, written out; filled by the first who asks."""
    return []


@torch.no_grad()
def written_out(oracle: Oracle, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(NUM_GREEDY):
        ids = torch.cat([ids, oracle.model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[0, len(prompt) :].tolist()


class Counting(GreedyReference):
    """After token n comes n + 1."""

    def __init__(self) -> None:
        self.passes = 0

    def logits(self, ids: list[int]) -> torch.Tensor:
        self.passes += 1
        return torch.nn.functional.one_hot(torch.tensor(ids) + 1, 100).float()


@pytest.mark.parametrize("place", [0, 1, NUM_GREEDY // 2, NUM_GREEDY - 1])
def test_a_wrong_token_is_found_wherever_it_is(llama: Oracle, told: list[list[int]], place: int) -> None:
    prompts = llama.prompts[2:4]
    told += [] if told else [written_out(llama, prompt) for prompt in prompts]
    fresh = Oracle(llama.folder, llama.model)
    assert_greedy(fresh, told, prompts)
    wrong = [told[0], [*told[1][:place], (told[1][place] + 1) % 256, *told[1][place + 1 :]]]
    for reference in (fresh, Oracle(llama.folder, llama.model)):  # with the right tokens known, and not
        with pytest.raises(AssertionError):
            assert_greedy(reference, wrong, prompts)
        assert reference.greedy_after(prompts, wrong) == told


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize(
    "guess",
    [[], [4], [4, 5, 6, 7, 8], [4, 5, 6, 7, 8, 9, 10], [9, 9, 9, 9, 9], [4, 9, 6, 7, 8], [4, 5, 6, 7, 9], [4, 5, 6]],
    ids=str,
)
def test_a_guess_changes_no_token(guess: list[int], count: int) -> None:
    assert Counting().continue_greedily([1, 2, 3], count, guess) == [4, 5, 6, 7, 8][:count]


def test_a_right_guess_takes_one_forward_pass() -> None:
    reference = Counting()
    assert reference.continue_greedily([3], 60, list(range(4, 64))) == list(range(4, 64))
    assert reference.passes == 1


@pytest.mark.parametrize("length", [NUM_GREEDY - 1, NUM_GREEDY + 1])
def test_an_answer_that_is_too_short_or_too_long_is_found(length: int) -> None:
    with pytest.raises(AssertionError):
        assert_greedy(Counting(), [list(range(4, 4 + length))], [[3]])
