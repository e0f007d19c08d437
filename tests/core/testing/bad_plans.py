"""As bad_backends: what goes wrong with batches and their plans, and what waits for the device."""

from __future__ import annotations

import dataclasses
import math

import torch
from core.testing.bad_backends import breaks
from core.testing.good_backend import GoodBackend, GoodPlan

from enginery.api import StalePlan, hookimpl


@breaks("empty-batch")
class NeedsARequest(GoodBackend):
    @hookimpl
    def plan_forward_metadata(self, batch) -> GoodPlan:
        assert int(batch.kv_lens_cpu.max()) >= 0
        return super().plan_forward_metadata(batch)


@breaks("padding-only")
class PadsInSomebodysState(GoodBackend):
    def recur(self, mixed, gates, part, layer, out) -> None:
        states = tuple(state % 48 for state in part.states)
        super().recur(mixed, gates, dataclasses.replace(part, states=states), layer, out)


@breaks("long-tail")
class HasRoomForTwoThousandTokens(GoodBackend):
    def attend_part(self, q, part, layer, out) -> None:
        super().attend_part(q, dataclasses.replace(part, length=min(part.length, 2048)), layer, out)


@breaks("padded-equals-unpadded")
class GivesPaddingToTheLastRequest(GoodBackend):
    @hookimpl
    def plan_forward_metadata(self, batch) -> GoodPlan:
        plan = super().plan_forward_metadata(batch)
        if not plan.parts:
            return plan
        *parts, last = plan.parts
        last = dataclasses.replace(last, rows=slice(last.rows.start, batch.num_tokens))
        return dataclasses.replace(plan, parts=(*parts, last))


@breaks("chunked-equals-whole")
class ForgetsWhatIsCached(GoodBackend):
    def attend_part(self, q, part, layer, out) -> None:
        num_rows = part.rows.stop - part.rows.start
        skipped = (part.length - num_rows) // self.page_size
        length = part.length - skipped * self.page_size
        super().attend_part(q, dataclasses.replace(part, pages=part.pages[skipped:], length=length), layer, out)


@breaks("prefix-hit")
class TakesAPageForItsFirstOwners(GoodBackend):
    def __init__(self, context) -> None:
        super().__init__(context)
        self.owned: dict[int, torch.Tensor] = {}

    @hookimpl
    def plan_forward_metadata(self, batch) -> GoodPlan:
        plan = super().plan_forward_metadata(batch)
        parts = [dataclasses.replace(p, pages=self.owned.setdefault(int(p.pages[0]), p.pages)) for p in plan.parts]
        return dataclasses.replace(plan, parts=tuple(parts))


@breaks("mla-strategies")
class SeesAheadInOneShot(GoodBackend):
    @hookimpl
    def init_mha_chunk_metadata(self, batch, chunks, disable_ragged):
        if disable_ragged:
            chunks = tuple(dataclasses.replace(chunk, causal=False) for chunk in chunks)
        plan = super().init_mha_chunk_metadata(batch, chunks, disable_ragged)

        def attend(q, k, v, layer, piece, out, lse) -> None:
            plan.attend(q, k, v, layer, dataclasses.replace(piece, causal=piece.causal and not disable_ragged), out, lse)

        return dataclasses.replace(plan, attend=attend)


@breaks("log-sum-exp")
class ReturnsBaseTwo(GoodBackend):
    def in_base(self, lse):
        return lse / math.log(2.0)


@breaks("log-sum-exp", lse_base="2")
class StatesBaseTwo(GoodBackend):
    pass


@breaks("log-sum-exp")
class SaysZeroForNothing(GoodBackend):
    def in_base(self, lse):
        return lse.clamp(min=-1000.0)


@breaks("batch-invariance")
class DependsOnTheBatch(GoodBackend):
    def attend(self, q, k, v, layer, batch, plan, out) -> None:
        super().attend(q, k, v, layer, batch, plan, out)
        out.mul_(1 + 1e-7 * batch.num_requests)


@breaks("plan-value")
class PlansCanBeChanged(GoodBackend):
    @hookimpl
    def plan_forward_metadata(self, batch) -> GoodPlan:
        class Open(GoodPlan):
            pass

        made = super().plan_forward_metadata(batch)
        return Open(key=made.key, parts=made.parts)


@breaks("plan-value")
class PlansForNobody(GoodBackend):
    def key(self, batch):
        return super().key(batch)._replace(backend="somebody")


@breaks("plan-a-plan-b-run-a")
class KeepsThePlan(GoodBackend):
    def __init__(self, context) -> None:
        super().__init__(context)
        self.plan = None

    @hookimpl
    def plan_forward_metadata(self, batch) -> GoodPlan:
        self.plan = super().plan_forward_metadata(batch)
        return self.plan

    def plan_of(self, plan, batch) -> GoodPlan:
        super().plan_of(plan, batch)
        return self.plan


@breaks("plan-a-plan-b-run-a")
class GathersKeysOncePerPlan(GoodBackend):
    def __init__(self, context) -> None:
        super().__init__(context)
        self.first = {}

    def attend(self, q, k, v, layer, batch, plan, out) -> None:
        first = self.first.setdefault(plan, layer.local_id)
        super().attend(q, k, v, dataclasses.replace(layer, local_id=first), batch, plan, out)


@breaks("numbers")
class TakesRowsWithoutGaps(GoodBackend):
    def attend(self, q, k, v, layer, batch, plan, out) -> None:
        super().attend(q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1)), k, v, layer, batch, plan, out)


@breaks("plan-value")
class WritesToTheBatch(GoodBackend):
    @hookimpl
    def plan_forward_metadata(self, batch) -> GoodPlan:
        plan = super().plan_forward_metadata(batch)
        batch.seats_cpu.add_(1)
        return plan


@breaks("stale-plans")
class AcceptsAnyPlan(GoodBackend):
    def plan_of(self, plan, batch) -> GoodPlan:
        if plan is None:
            raise StalePlan("there is none")
        return plan


@breaks("stale-plans")
class PlansForItselfIfNobodyDid(GoodBackend):
    def plan_of(self, plan, batch) -> GoodPlan:
        return self.plan_forward_metadata(batch) if plan is None else super().plan_of(plan, batch)


@breaks("stale-plans")
class ComplainsInItsOwnWords(GoodBackend):
    def plan_of(self, plan, batch) -> GoodPlan:
        assert plan is not None
        return super().plan_of(plan, batch)


class _IgnoresPartOfTheKey(GoodBackend):
    ignored = ""

    def plan_of(self, plan, batch) -> GoodPlan:
        if plan is not None:
            now = self.key(batch)._asdict()[self.ignored]
            plan = dataclasses.replace(plan, key=plan.key._replace(**{self.ignored: now}))
        return super().plan_of(plan, batch)


for _field in ("backend", "phase", "num_requests", "num_tokens", "batch", "epoch"):
    breaks("stale-plans")(type(f"Ignores_{_field}", (_IgnoresPartOfTheKey,), {"ignored": _field}))


@breaks("planning-reads-nothing")
class ReadsPositionsWhenPlanning(GoodBackend):
    @hookimpl
    def plan_forward_metadata(self, batch) -> GoodPlan:
        assert batch.num_tokens == 0 or int(batch.positions.max()) >= 0
        return super().plan_forward_metadata(batch)


@breaks("planning-reads-nothing")
class ReadsItsOwnTensorWhenPlanning(GoodBackend):
    @hookimpl
    def plan_forward_metadata(self, batch) -> GoodPlan:
        assert int(batch.kv_lens_cpu.to(self.device).sum()) >= 0
        return super().plan_forward_metadata(batch)


@breaks("attend-reads-nothing")
class ReadsAnItem(GoodBackend):
    def seen(self, rows, keys, window):
        assert keys[-1].item() >= 0
        return super().seen(rows, keys, window)


@breaks("attend-reads-nothing")
class ReadsAList(GoodBackend):
    def seen(self, rows, keys, window):
        assert rows.tolist()
        return super().seen(rows, keys, window)


@breaks("attend-reads-nothing")
class AsksATensorWhetherItIsTrue(GoodBackend):
    def seen(self, rows, keys, window):
        assert (rows >= 0).all()
        return super().seen(rows, keys, window)


@breaks("attend-reads-nothing")
class IndexesByAMask(GoodBackend):
    def seen(self, rows, keys, window):
        return super().seen(rows[rows >= 0][:, None], keys, window)


@breaks("attend-reads-nothing")
class CopiesToTheHost(GoodBackend):
    def seen(self, rows, keys, window):
        return super().seen(rows.to("cpu"), keys, window)
