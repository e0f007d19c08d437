"""How long the device takes for each part of a round of speculation, and how long it waits for the host before the next.

launch .. draft    verify    the target's forward, and which drafts are right
draft .. steps     follow    the draft model over what the target ran; nothing, where it reads the target's keys
steps .. end       steps     its guesses behind the first
end .. launch      between   nothing of a round
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Final, ParamSpec, TypeVar

import torch

from enginery.contracts.step import StepInput
from enginery.worker.drafts.draft_model import DraftModel
from enginery.worker.runner import Runner

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")
_PARTS: Final = ("verify", "follow", "steps", "between")
_BEGIN: Final = (
    (Runner, "launch", "verify"),
    (Runner, "draft", "follow"),
    (DraftModel, "ahead", "steps"),
    (DraftModel, "go_on", "steps"),
)


class RoundTimes:
    """Of the steps of this process, while `watching`."""

    def __init__(self, device: torch.device) -> None:
        self._first = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._rounds: list[tuple[bool, dict[str, Callable[[], float]]]] = []  # whether it verifies, and when each part began

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note when parts begin: on CUDA by events among what is launched, which hold nothing up."""
        with contextlib.ExitStack() as undone:
            for owner, name, part in _BEGIN:
                method = getattr(owner, name)
                undone.callback(setattr, owner, name, method)
                setattr(owner, name, self._noting(method, part))
            if self._first is not None:
                self._first.record()
            yield

    def seconds(self) -> dict[str, float] | None:
        """The median of each part, of rounds that verified and that another step came behind; None: there were none."""
        if self._first is not None:
            torch.cuda.synchronize()
        taken = list[list[float]]()
        for (verifies, begun), (_, following) in itertools.pairwise(self._rounds):
            if verifies and "end" in begun:
                noted = [*(begun.get(part, begun["end"]) for part in _PARTS[:-1]), begun["end"], following["verify"]]
                taken.append([end() - begin() for begin, end in itertools.pairwise(noted)])
        return dict(zip(_PARTS, map(statistics.median, zip(*taken, strict=True)), strict=True)) if taken else None

    def _noting(self, method: Callable[_Given, _Made], part: str) -> Callable[_Given, _Made]:
        @functools.wraps(method)
        def noted(*given: _Given.args, **named: _Given.kwargs) -> _Made:
            if part == "verify":
                self._rounds.append((isinstance(given[1], StepInput) and given[1].verifies, {}))
            begun = self._rounds[-1][1]
            begun[part] = self._now()
            made = method(*given, **named)
            if part == "follow":
                begun["end"] = self._now()
            return made

        return noted

    def _now(self) -> Callable[[], float]:
        """Seconds by the device's clock, once it has come so far."""
        if (first := self._first) is None:
            return functools.partial(float, time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return lambda: float(first.elapsed_time(event)) / 1e3
