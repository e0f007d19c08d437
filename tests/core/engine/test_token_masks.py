"""Masks of a step's rows: which bits are set, what they do to logits, and when an answer may end."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enginery.contracts.grammars import Grammar, GrammarKind
from enginery.contracts.request import SamplingParams
from enginery.contracts.step import SamplingInput
from enginery.engine.sampling_input import SamplingRow, fill_masks, sampling_input
from enginery.errors import RequestError
from enginery.nn.reference_ops import reference_ops
from enginery.schedule.adjustments import Adjustments
from enginery.worker import sampling

ANY = Grammar(kind=GrammarKind.JSON_OBJECT)
EOS = frozenset({3, 40})


class Allows:
    """A state that allows these tokens, or is beyond a limit."""

    is_finished = False

    def __init__(self, tokens: Iterable[int], *, broken: bool = False) -> None:
        self.tokens = set(tokens)
        self.broken = broken

    def fill_mask(self, row: np.ndarray) -> None:
        if self.broken:
            raise RequestError("too many states")
        bits = np.zeros(row.size * 32, dtype=np.uint8)
        bits[sorted(self.tokens)] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        return token_id in self.tokens


def row(state: Allows | None, num_output: int = 0, **params: object) -> SamplingRow:
    given_params = SamplingParams(**{"seed": 0, "temperature": 0, "grammar": None if state is None else ANY, **params})
    token_ids = array("i", [1] * (1 + num_output))
    return SamplingRow(Adjustments(given_params, token_ids, 1), position=len(token_ids), grammar=state)


def prepared(*rows: SamplingRow, vocab_size: int = 70) -> tuple[SamplingInput, Mapping[int, str]]:
    return sampling_input(rows, EOS, vocab_size=vocab_size)


def adjusted(logits: torch.Tensor, made: tuple[SamplingInput, Mapping[int, str]]) -> torch.Tensor:
    """What the worker chooses from."""
    seen: list[torch.Tensor] = []
    ops = dataclasses.replace(reference_ops(), greedy=lambda values: seen.append(values) or values.argmax(-1))
    sampling.sample(logits, made[0], ops=ops)
    return seen[0]


def allowed(*rows: SamplingRow, vocab_size: int = 70) -> list[set[int]]:
    made = prepared(*rows, vocab_size=vocab_size)
    assert not made[1]
    logits = adjusted(torch.zeros(len(rows), vocab_size), made)
    return [set(torch.isfinite(values).nonzero().flatten().tolist()) for values in logits]


@given(st.integers(4, 100), st.data())
def test_exactly_the_bits_that_are_set_stay(vocab_size: int, data: st.DataObject) -> None:
    tokens = data.draw(st.sets(st.integers(0, vocab_size - 1), min_size=1))
    assert allowed(row(Allows(tokens)), row(None), vocab_size=vocab_size) == [tokens, set(range(vocab_size))]


def test_without_grammars_there_is_no_mask() -> None:
    assert fill_masks([row(None)], EOS, vocab_size=8) == (None, {})


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_takes_only_what_its_grammar_allows_whatever_its_bias(temperature: float) -> None:
    rows = [row(Allows({5}), temperature=temperature, logit_bias={6: 100}), row(None, temperature=0)]
    logits = torch.zeros(2, 70)
    logits[:, 9] = 30.0
    assert sampling.sample(logits, prepared(*rows)[0], ops=reference_ops()).tolist() == [5, 9]
    assert logits[0, 5] == 0, "the caller's logits were changed"


@pytest.mark.parametrize(
    ("params", "expected"),
    [({}, {3, 5}), ({"min_tokens": 3}, {3, 5}), ({"min_tokens": 4}, {5}), ({"ignore_eos": True}, {5})],
    ids=str,
)
def test_an_end_comes_late_where_that_is_asked_for(params: dict[str, object], expected: set[int]) -> None:
    assert allowed(row(Allows({3, 5}), 3, **params)) == [expected]


@pytest.mark.parametrize("params", [{"min_tokens": 9}, {"ignore_eos": True}], ids=str)
def test_an_end_comes_where_nothing_else_may(params: dict[str, object]) -> None:
    assert allowed(row(Allows({3, 40}), 2, **params)) == [{3, 40}]
    rows = [row(Allows({3}), **params)]
    assert sampling.sample(torch.randn(1, 70), prepared(*rows)[0], ops=reference_ops()).tolist() == [3]


def test_stop_tokens_wait_for_min_tokens_too() -> None:
    assert allowed(row(Allows({5, 6, 40}), min_tokens=2, stop_token_ids=(6,))) == [{5}]


def test_a_row_that_cannot_go_on_is_named_and_the_others_are_masked() -> None:
    made = prepared(row(Allows({5})), row(Allows((), broken=True)), row(Allows(())))
    assert made[1] == {1: "too many states", 2: "the grammar allows no token here, not even the end"}
    logits = adjusted(torch.zeros(3, 70), made)
    assert torch.isfinite(logits).sum(-1).tolist() == [1, 70, 70]


def test_min_tokens_counts_the_drafts_before_a_row() -> None:
    """The first row of a verification may not end, the one behind a draft may."""
    first = row(Allows([3, 5]), num_output=1, min_tokens=2)
    behind = first._replace(position=first.position + 1, drafts=(5,))
    assert allowed(first, behind) == [{5}, {3, 5}]
