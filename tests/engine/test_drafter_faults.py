"""A drafter of the host that fails: everyone gets plain decoding's tokens, the log says it once, and it is asked no more."""

from __future__ import annotations

import dataclasses
import logging
import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from engine.rank_threads import on_threads
from engine.test_overlap_with_host_drafters import request, told_by
from engine.test_speculation import Scripted, with_drafter
from parity.engine_driver import options
from parity.oracle import FAMILIES, Oracle

from enginery.contracts.drafting import DraftAsk
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

FAULTS: dict[str, Callable[[list[Sequence[int]]], object]] = {
    "ZeroDivisionError: division by zero": lambda right: 1 / 0,
    "SystemExit: 3": lambda right: sys.exit(3),
    "propose returned None, and must return a sequence of tokens for each of": lambda right: None,
    "propose returned [], and must return a sequence of tokens for each of": lambda right: [],
    "propose returned None for a request, not a sequence of integers": lambda right: [None for _ in right],
    "propose returned [0.5, -3, 10] for a request, not a sequence of integers": lambda right: [[0.5, -3, 10] for _ in right],
}


class Failing(Scripted):
    """Fails in its fourth call, or where it is to forget a request. calls: of `propose`."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], fault: Callable[[list[Sequence[int]]], object] | None) -> None:
        super().__init__("right", answers)
        self.fault, self.calls = fault, 0

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        self.calls += 1
        right = super().propose(asks)
        return right if self.fault is None or self.calls < 4 else self.fault(right)  # type: ignore[return-value]

    def forget(self, key: str) -> None:
        if self.fault is None:
            raise LookupError(f"who is {key}?")
        super().forget(key)


@pytest.mark.parametrize(
    ("why", "overlap", "tp"),
    [*((why, at % 2 == 0, 1) for at, why in enumerate(FAULTS)), ("", True, 1), ("", False, 1), ("", True, 2)],
)
def test_nobody_suffers_from_a_drafter_that_fails(
    write_oracle: Callable[..., Oracle], caplog: pytest.LogCaptureFixture, why: str, tp: int, *, overlap: bool
) -> None:
    oracle, registry = write_oracle("llama", FAMILIES["llama"]), Registry.load()
    asked = options(oracle, overlap=overlap)
    requests = [request(f"{at}", (3 + at, *oracle.prompts[at][:9]), max_tokens=18 + 6 * at) for at in range(3)]
    expected = told_by(Engine.build(asked, registry), requests)
    failing = Failing({each.prompt_token_ids: expected[each.request_id][0] for each in requests}, FAULTS.get(why))
    drafting = dataclasses.replace(asked, drafter="scripted", draft_length="3", tp=tp)
    drafted = with_drafter(registry, lambda _: failing)
    with nullcontext((Engine.build(drafting, drafted), None)) if tp == 1 else on_threads(drafting, drafted) as (engine, _):
        assert told_by(engine, requests) == expected
        calls = failing.calls
        assert told_by(engine, requests) == expected
        drafts = engine.meter.stats().drafts
    assert failing.calls == calls, "it is asked no more"
    assert drafts.accepted > 0, "it had guessed before"
    (said,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    what = f"propose tokens: {why}" if why and "propose" not in why else why or "forget a request: LookupError: who is 0?"
    assert said.getMessage() == f"the drafter scripted guesses no more until a restart: {drafts.failure}"
    assert what in drafts.failure
    assert "plugin " in drafts.failure
    assert said.exc_info is not None


HELD: list[object] = []
HOLDS: dict[str, Callable[[Any], object]] = {
    "": lambda tokens: HELD.append(np.asarray(tokens)),  # numpy's view of an array: that could not grow
    "memoryview": lambda tokens: HELD.append(memoryview(tokens)),
    "does not support item assignment": lambda tokens: operator.setitem(tokens, -1, 7),
    "has no attribute 'append'": lambda tokens: tokens.append(7),
}


@pytest.mark.parametrize("why", HOLDS)
def test_a_drafter_that_keeps_or_changes_what_it_reads_changes_no_answer(write_oracle: Callable[..., Oracle], why: str) -> None:
    """Its own failure is told, if it is one."""
    oracle, registry = write_oracle("llama", FAMILIES["llama"]), Registry.load()
    requests = [request("r", oracle.prompts[0])]
    expected = told_by(Engine.build(options(oracle), registry), requests)

    class Holding(Scripted):
        def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
            HOLDS[why](asks[0].token_ids)
            return super().propose(asks)

    drafting = dataclasses.replace(options(oracle), drafter="scripted", draft_length="3")
    held = Holding("right", {each.prompt_token_ids: expected[each.request_id][0] for each in requests})
    engine = Engine.build(drafting, with_drafter(registry, lambda _: held))
    assert told_by(engine, requests) == expected
    assert why in (failure := engine.meter.stats().drafts.failure)
    assert bool(failure) == bool(why)
