"""A backend at work in a stage: built as the engine builds it, planned by its relay, and its results request by request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from enginery.attention import axes
from enginery.attention.latent import LatentAttention, LatentSettings
from enginery.attention.relay import BackendRelay
from enginery.attention.watch import Watch, poison
from enginery.contracts.attention import BackendContext, SparseCoordinator
from enginery.contracts.batch import ForwardBatch, Phase
from enginery.contracts.latent import PrefillStrategy
from enginery.contracts.plan import ForwardPlan
from enginery.kv.arena import DeviceArena
from enginery.testing.cases import AttnCase
from enginery.testing.rules import BrokenRule
from enginery.testing.stage import Stage, Turn, num_out_heads
from enginery.testing.subject import Subject

CHUNK_TOKENS: Final = 24  # small, so that a prefix makes several chunks
_GUARD: Final = 77.0


class Workbench(Stage):
    """leaf: the backend's own relay. relay: the one to plan and attend by, which is MLA around it where the case has a strategy."""

    def __init__(
        self,
        subject: Subject,
        case: AttnCase,
        *,
        num_tokens: int = 1000,
        num_requests: int = 40,
        instance: str = "kit#0",
        coordinator: SparseCoordinator | None = None,
        options: object | None = None,
        watched: bool = True,
    ) -> None:
        """watched: with the checks of `Watch`, which read from the device."""
        super().__init__(case, subject.device, num_tokens=num_tokens, num_requests=num_requests)
        context = BackendContext(
            instance=instance,
            geometry=self.geometry,
            pool=self.pool,
            states=self.states,
            device=self.device,
            dtype=self.dtype,
            arena=DeviceArena(self.device),
            coordinator=coordinator,
            options=subject.options if options is None else options,
        )
        self.backend = subject.create(context)
        watch = Watch() if watched else None
        self.leaf = self.relay = BackendRelay(self.backend, subject.offer.source, instance=instance, watch=watch)
        self.phases = subject.can.phases
        if case.strategy is not None:
            tokens = CHUNK_TOKENS if case.strategy is PrefillStrategy.CHUNKED else 1 << 20
            settings = LatentSettings(strategy=case.strategy, chunk_tokens=tokens)
            composite = LatentAttention(
                self.leaf, capabilities=subject.can, geometry=self.geometry, pool=self.pool, settings=settings
            )
            self.relay = BackendRelay(composite, "the core")

    def steps(self) -> Iterator[tuple[Phase, list[Turn]]]:
        """New requests for each claimed phase, in place of those before: pages just full or just begun; one token or many."""
        page = self.case.page_size if self.case.facts.recurrent is None else 16
        decodes = [(page - 1, 1), (page, 1), (0, 1), (2 * page + 3, 1)]
        prefills = [(0, page), (0, 1), (page, page + 2), (3, 2 * page)]
        lengths = {
            Phase.DECODE: decodes,
            Phase.PREFILL: prefills,
            Phase.MIXED: decodes + prefills,
            Phase.VERIFY: [(page, 3), (5, 3)],
        }
        for phase in sorted(lengths.keys() & self.phases):
            self.forget()
            yield phase, self.turns(lengths[phase])

    def pad(self, batch: ForwardBatch, *, requests: int, tokens: int) -> ForwardBatch:
        """Pad the batch by so many requests and tokens."""
        num_requests, num_tokens = batch.num_requests + requests, batch.num_tokens + tokens
        return axes.pad(batch, num_requests=num_requests, num_tokens=num_tokens, geometry=self.geometry)

    def run(self, turns: Sequence[Turn], phase: Phase) -> list[torch.Tensor]:
        """Write, plan, attend: each request's rows, [new, H, V]."""
        return self.plan_and_attend(self.batch(turns, phase), turns)

    def plan_and_attend(self, batch: ForwardBatch, turns: Sequence[Turn]) -> list[torch.Tensor]:
        """Plan and attend over a batch whose keys and values are written; it may be padded."""
        return self.attend(self.relay.plan(batch), turns)

    def attend(self, batch: ForwardBatch, turns: Sequence[Turn]) -> list[torch.Tensor]:
        """Attend over a planned batch. Returns the rows of each request."""
        whole = self.guarded_out(batch.num_tokens)
        self.call(self.inputs(turns, batch.num_tokens), batch, batch.plan, whole[1:-1])
        return self.rows_of(whole, turns)

    def call(self, inputs: Sequence[torch.Tensor], batch: ForwardBatch, plan: ForwardPlan | None, out: torch.Tensor) -> None:
        """`attend`, or `advance` of a recurrent layer, with this plan."""
        assert plan is not None, "the batch is planned"
        if self.case.facts.recurrent is not None:
            mixed, gates = inputs
            self.relay.advance(mixed, gates, self.layer, batch, plan, out)
        else:
            q, k, v = inputs
            self.relay.attend(q, k, v, self.layer, batch, plan, out)

    def replay(self, captured: ForwardBatch, turns: Sequence[Turn], phase: Phase = Phase.DECODE) -> list[torch.Tensor]:
        """What a graph of the planned batch `captured` would give for these requests: the captured call, without a graph."""
        more = captured.num_requests - len(turns)
        batch = self.pad(self.batch(turns, phase), requests=more, tokens=captured.num_tokens - sum(turn.new for turn in turns))
        assert captured.plan is not None, "what is captured is planned"
        self.relay.refresh(captured.plan, batch)
        whole = self.guarded_out(captured.num_tokens)
        self.call_leaf(self.inputs(turns, captured.num_tokens), captured, captured.plan, whole[1:-1])
        return self.rows_of(whole, turns)

    def call_leaf(self, inputs: Sequence[torch.Tensor], batch: ForwardBatch, plan: ForwardPlan | None, out: torch.Tensor) -> None:
        """`attend` or `advance` of the backend itself, past its relay, which would refuse some of what kernels must refuse too."""
        method = self.leaf.methods["attend" if self.case.facts.recurrent is None else "advance"]
        method(*inputs, self.layer, batch, plan, out)

    def guarded_out(self, num_tokens: int) -> torch.Tensor:
        """[T + 2, H, V]: what is not written stays NaN; the first row and the last are not the backend's."""
        shape = (num_tokens + 2, num_out_heads(self.case.facts), self.dims[1])
        whole = poison(torch.empty(shape, dtype=self.dtype, device=self.device))
        whole[0], whole[-1] = _GUARD, _GUARD
        return whole

    def rows_of(self, whole: torch.Tensor, turns: Sequence[Turn]) -> list[torch.Tensor]:
        """Each request's rows of a guarded output. Raises `BrokenRule` if a guard row was written to."""
        if not bool((whole[[0, -1]] == _GUARD).all()):
            raise BrokenRule("it writes outside of `out`")
        sizes = [turn.new for turn in turns]
        return list(torch.split(whole[1 : 1 + sum(sizes)], sizes)) if sizes else []
