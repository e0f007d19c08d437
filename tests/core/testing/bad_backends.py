"""Backends that break one rule each: what the kit must catch. Each differs from the good one by one thing.

BAD: by rule, the pairs (spec, factory) that must break it, of this module, bad_plans and bad_verification. `Subject.imported` finds
one as `core.testing.MODULE:NAME`.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

import torch
from core.testing.good_backend import CAPABILITIES, SPEC, GoodBackend, GoodPlan

from enginery.api import (
    AttnBackendSpec,
    Capabilities,
    LayerSpec,
    Phase,
    Reason,
    hookimpl,
)

BAD: dict[str, list[str]] = {}


def breaks(rule: str, *, spec: AttnBackendSpec | None = None, **capabilities: object):
    """Offers the class below it, with these capabilities instead of the good one's, as one that breaks `rule`."""
    can: Capabilities = dataclasses.replace(CAPABILITIES, **capabilities)

    def offer(backend):
        offered = spec or dataclasses.replace(SPEC, name=backend.__name__, capabilities=can)
        name = f"{backend.__name__}_OFFER"
        setattr(sys.modules[backend.__module__], name, (offered, backend))
        BAD.setdefault(rule, []).append(f"{backend.__module__}:{name}")
        return backend

    return offer


@breaks("hooks")
class WrongArgumentName(GoodBackend):
    @hookimpl
    def plan_forward_metadata(self, forward_batch) -> GoodPlan:
        raise AssertionError("never called")


@breaks("hooks")
class ExtraRequiredArgument(GoodBackend):
    @hookimpl
    def plan_forward_metadata(self, batch, capture, stream) -> GoodPlan:
        raise AssertionError("never called")


@breaks("hooks")
class NeverPlans(GoodBackend):
    plan_forward_metadata = None


@breaks("hooks")
class AttendWantsMore(GoodBackend):
    def attend(self, q, k, v, layer, batch, plan, out, scratch) -> None:
        raise AssertionError("never called")


@breaks("hooks")
class AttendRenamesArguments(GoodBackend):
    def attend(self, q, k, v, layer, forward_batch, plan, output) -> None:
        super().attend(q, k, v, layer, forward_batch, plan, output)


@breaks("hooks")
class AdvanceWithoutPlan(GoodBackend):
    def advance(self, mixed, gates, layer, batch, out) -> None:
        raise AssertionError("never called")


@breaks("hooks")
class ClaimsRecurrencesWithoutAdvance(GoodBackend):
    advance = None


@breaks("hooks")
class NamesItself(GoodBackend):
    def __init__(self, context) -> None:
        super().__init__(context)
        self.backend_id = "mine"


@breaks("hooks")
class ClaimsRaggedWithoutHook(GoodBackend):
    init_mha_chunk_metadata = None


@breaks("hooks", mla_ragged=False)
class HasUnclaimedHook(GoodBackend):
    pass


@breaks("hooks", graphs=True)
class ClaimsGraphsWithoutHook(GoodBackend):
    pass


def _refuse_bfloat16(needs):
    return [Reason(rule="dtype", text="bfloat16 is not done yet")] if needs.dtype == "bfloat16" else []


@breaks("claims", spec=dataclasses.replace(SPEC, refuse_also=_refuse_bfloat16))
class RefusesWhatItClaims(GoodBackend):
    pass


@breaks("claims", spec=dataclasses.replace(SPEC, refuse_also=lambda needs: [Reason(rule="mood", text="not today")]))
class RefusesEverything(GoodBackend):
    pass


class CarelessSpec(AttnBackendSpec):
    def refuse(self, needs):
        return []


@breaks("refusals", spec=CarelessSpec(name="careless", api=(2, 0), priority=1, capabilities=CAPABILITIES, summary="anything"))
class RefusesNothing(GoodBackend):
    pass


class ForgetfulSpec(AttnBackendSpec):
    def refuse(self, needs):
        return [reason for reason in super().refuse(needs) if reason.rule != "page size"]


@breaks("refusals", spec=ForgetfulSpec(name="forgetful", api=(2, 0), priority=1, capabilities=CAPABILITIES, summary="any page"))
class RefusesNoPageSize(GoodBackend):
    pass


@breaks("same-attributes")
class ConditionalAttributes(GoodBackend):
    def __init__(self, context) -> None:
        super().__init__(context)
        if context.geometry.page_size > 1:
            self.page_buffer = torch.zeros(4)


@breaks("same-attributes")
class AttributesWithCoordinator(GoodBackend):
    def __init__(self, context) -> None:
        super().__init__(context)
        if context.coordinator is not None:
            self.coordinator = context.coordinator


@dataclass(frozen=True)
class Options:
    fast: bool = False


@breaks("same-attributes", spec=dataclasses.replace(SPEC, options=Options))
class AttributesWithOption(GoodBackend):
    def __init__(self, context) -> None:
        super().__init__(context)
        if context.options.fast:
            self.fast_path = True


@breaks("same-attributes")
class AttributesAppearLater(GoodBackend):
    def attend(self, q, k, v, layer, batch, plan, out) -> None:
        self.last_layer = layer
        super().attend(q, k, v, layer, batch, plan, out)


PREPARED: list[bool] = []  # filled by the test in its own process only


@breaks("another-process")
class NeedsItsParent(GoodBackend):
    def __init__(self, context) -> None:
        super().__init__(context)
        if not PREPARED:
            raise RuntimeError("nobody prepared this process")


@breaks("numbers")
class LosesTheLastPage(GoodBackend):
    def num_pages(self, length) -> int:
        return max(1, length // self.page_size)


@breaks("numbers")
class CountsOneTokenTooMany(GoodBackend):
    def attend_part(self, q, part, layer, out) -> None:
        super().attend_part(q, dataclasses.replace(part, length=part.length - 1) if part.length > 1 else part, layer, out)


@breaks("numbers")
class IgnoresTheWindow(GoodBackend):
    def seen(self, rows, keys, window):
        return super().seen(rows, keys, None)


@breaks("numbers")
class IgnoresSinks(GoodBackend):
    def attend_part(self, q, part, layer: LayerSpec, out) -> None:
        super().attend_part(q, part, dataclasses.replace(layer, sinks=None), out)


@breaks("numbers")
class FailsOnAHeadDim(GoodBackend):
    def attend_part(self, q, part, layer, out) -> None:
        if layer.facts.head_dim == 16:
            raise RuntimeError("no kernel for head dim 16")
        super().attend_part(q, part, layer, out)


@breaks("numbers")
class TakesGlobalForLocalId(GoodBackend):
    def attend(self, q, k, v, layer, batch, plan, out) -> None:
        super().attend(q, k, v, dataclasses.replace(layer, local_id=layer.global_id), batch, plan, out)


@breaks("numbers")
class WritesOutsideOfOut(GoodBackend):
    def attend(self, q, k, v, layer, batch, plan, out) -> None:
        super().attend(q, k, v, layer, batch, plan, out)
        out.as_strided((1,), (1,), 0).zero_()


@breaks("numbers")
class ReturnsItsResult(GoodBackend):
    def attend(self, q, k, v, layer, batch, plan, out):
        result = torch.zeros_like(out)
        super().attend(q, k, v, layer, batch, plan, result)
        return result


@breaks("numbers")
class WritesToACopy(GoodBackend):
    def attend(self, q, k, v, layer, batch, plan, out) -> None:
        super().attend(q, k, v, layer, batch, plan, out.clone())


@breaks("decoding")
class DecodesOneRequestInAnotherKernel(GoodBackend):
    """Which was written for another head dim."""

    def attend(self, q, k, v, layer, batch, plan, out) -> None:
        is_one = batch.phase is Phase.DECODE and batch.num_requests == 1 and layer.facts.head_dim == 16
        super().attend(q, k, v, dataclasses.replace(layer, scale=0.125) if is_one else layer, batch, plan, out)


@breaks("decoding")
class TakesRequestsInPairs(GoodBackend):
    """The last of an odd number sees a token less."""

    @hookimpl
    def plan_forward_metadata(self, batch) -> GoodPlan:
        lengths = batch.kv_lens_cpu.clone()
        if batch.phase is Phase.DECODE and batch.num_requests % 2 and batch.num_requests > 1:
            lengths[-1:] -= (lengths[-1:] > 1).int()
        plan = super().plan_forward_metadata(dataclasses.replace(batch, kv_lens_cpu=lengths))
        return dataclasses.replace(plan, key=self.key(batch))


@breaks("decoding")
class VerifiesOneRequestAsAPrompt(GoodBackend):
    """Which has nothing cached."""

    def attend_part(self, q, part, layer, out) -> None:
        alone = part.index == part.rows.start == 0 and len(q) == 3 == part.rows.stop and part.length > 3
        super().attend_part(q, dataclasses.replace(part, length=3) if alone else part, layer, out)


@breaks("large-scores")
class SubtractsNoMaximum(GoodBackend):
    def attend_part(self, q, part, layer, out) -> None:
        keys, values = (pages[part.pages].flatten(0, 1)[: part.length] for pages in self.pool.layer(layer.local_id))
        q, group = q[part.rows].float(), layer.facts.num_heads // layer.facts.num_kv_heads
        keys, values = (kept.float().repeat_interleave(group, dim=1) for kept in (keys, values))
        scores = torch.einsum("shd,lhd->hsl", q, keys) * layer.scale
        if (most := layer.facts.softcap) is not None:
            scores = most * torch.tanh(scores / most)
        rows = torch.arange(part.length - len(q), part.length)[:, None]
        weights = scores.exp().masked_fill(~self.seen(rows, torch.arange(len(keys)), layer.facts.sliding_window), 0.0)
        total = weights.sum(-1, keepdim=True) + (0 if layer.sinks is None else layer.sinks[:, None, None].exp())
        out[part.rows] = torch.einsum("hsl,lhv->shv", weights / total, values).to(out.dtype)


@breaks("ragged-lengths")
class ServesSixteenRequests(GoodBackend):
    def attend_part(self, q, part, layer, out) -> None:
        super().attend_part(q, part, layer, out)
        if part.index >= 16:
            out[part.rows] = 0


@breaks("ragged-lengths")
class KeepsSixtyFourStates(GoodBackend):
    def recur(self, mixed, gates, part, layer, out) -> None:
        super().recur(mixed, gates, part, layer, out)
        if part.index >= 64:
            out.zero_()


@breaks("ragged-lengths")
class TakesAllLengthsForEqual(GoodBackend):
    @hookimpl
    def plan_forward_metadata(self, batch) -> GoodPlan:
        count = max(1, batch.num_requests)
        equal = torch.full_like(batch.q_lens_cpu, batch.num_tokens // count)
        plan = super().plan_forward_metadata(dataclasses.replace(batch, q_lens_cpu=equal))
        return dataclasses.replace(plan, key=self.key(batch))
