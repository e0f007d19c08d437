"""Backends that break one rule each: what the kit must catch. Each differs from the good one by one thing.

BAD: by rule, the pairs (spec, factory) that must break it. Found by `Subject.imported` as `core.testing.bad_backends:NAME`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from core.testing.good_backend import CAPABILITIES, SPEC, GoodBackend, GoodPlan

from enginery.api import (
    Accepted,
    AttnBackendSpec,
    Capabilities,
    LayerSpec,
    MaskPart,
    Reason,
    StalePlan,
    VerifyMask,
    hookimpl,
)

BAD: dict[str, list[str]] = {}


def breaks(rule: str, *, spec: AttnBackendSpec | None = None, **capabilities: object):
    """Offers the class below it, with these capabilities instead of the good one's, as one that breaks `rule`."""
    can: Capabilities = dataclasses.replace(CAPABILITIES, **capabilities)

    def offer(backend):
        offered = spec or dataclasses.replace(SPEC, name=backend.__name__, capabilities=can)
        name = f"{backend.__name__}_OFFER"
        globals()[name] = (offered, backend)
        BAD.setdefault(rule, []).append(f"{__name__}:{name}")
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
class ContinuesTheLastOwnersState(GoodBackend):
    def recur(self, mixed, gates, part, layer, out) -> None:
        super().recur(mixed, gates, dataclasses.replace(part, length=part.length + 1), layer, out)


@breaks("chunked-equals-whole")
class WritesAStateWhereItWasRead(GoodBackend):
    def recur(self, mixed, gates, part, layer, out) -> None:
        super().recur(mixed, gates, dataclasses.replace(part, states=part.states[:1] * 2), layer, out)


@breaks("hooks")
class VerifiesWithoutCommitting(GoodBackend):
    commit_state = None


@breaks("states-after-verification")
class MovesStatesWhileItVerifies(GoodBackend):
    def with_states(self, part, batch, index):
        return dataclasses.replace(super().with_states(part, batch, index), verifies=False)


@breaks("states-after-verification")
class KeepsEveryDraft(GoodBackend):
    def stands(self, name, rows, count):
        return count + 1 <= rows


@breaks("states-after-verification")
class ForgetsTheFirstRow(GoodBackend):
    def stands(self, name, rows, count):
        return count == rows


@breaks("states-after-verification")
class LeavesConvolutionsBehindAllDrafts(GoodBackend):
    def stands(self, name, rows, count):
        return count + 1 <= rows if name == "conv" else count + 1 == rows


@breaks("states-after-verification")
class CommitsTheRowsOfTheNextRequest(GoodBackend):
    @hookimpl
    def commit_state(self, plan, accepted):
        return super().commit_state(plan, Accepted(counts=accepted.counts.roll(-1)))


@breaks("states-after-verification")
class MakesNoCheckpoints(GoodBackend):
    def with_states(self, part, batch, index):
        return dataclasses.replace(super().with_states(part, batch, index), checkpoint=(0, 0))


@breaks("states-amid-prompts")
class KeepsNoStateAmidAPrompt(GoodBackend):
    def keep_amid(self, mixed, gates, part, layer) -> None:
        pass


@breaks("states-amid-prompts")
class KeepsTheStateOfOneRowBefore(GoodBackend):
    def keep_amid(self, mixed, gates, part, layer) -> None:
        page, rows = part.checkpoint
        super().keep_amid(mixed, gates, dataclasses.replace(part, checkpoint=(page, max(rows - 1, 1))), layer)


@breaks("states-amid-prompts")
class KeepsTheStateInAnothersPage(GoodBackend):
    def keep_amid(self, mixed, gates, part, layer) -> None:
        page, rows = part.checkpoint
        super().keep_amid(mixed, gates, part, layer)
        super().keep_amid(mixed, gates, dataclasses.replace(part, checkpoint=(page + 1, rows)), layer)


@breaks("states-after-verification")
class CommitsWhereItRead(GoodBackend):
    def commit(self, mixed, gates, part, layer, count) -> None:
        super().commit(mixed, gates, dataclasses.replace(part, states=part.states[:1] * 2), layer, count)


@breaks("states-after-verification")
class ReadsHowManyStand(GoodBackend):
    def commit(self, mixed, gates, part, layer, count) -> None:
        super().commit(mixed, gates, part, layer, int(count))

    def stands(self, name, rows, count):
        return torch.tensor(count + 1 == rows)


@breaks("states-after-verification")
class CommitsTwice(GoodBackend):
    @hookimpl
    def commit_state(self, plan, accepted):
        return plan not in self.unsettled or super().commit_state(plan, accepted)


@breaks("device-lengths")
class BelievesTheHost(GoodBackend):
    def as_long_as(self, part, lengths):
        return part


@breaks("device-lengths")
class SeesOneKeyBehindTheEnd(GoodBackend):
    def as_long_as(self, part, lengths):
        return super().as_long_as(part, lengths + 1)


@breaks("device-lengths")
class GivesNumbersToEmptyParts(GoodBackend):
    """A chunk of 256 keys that lies wholly behind the end, by 0 * NaN."""

    def attend_part(self, q, part, layer, out) -> None:
        super().attend_part(q, part, layer, out)
        if len(part.pages) * self.page_size > -(-part.length // 256) * 256:
            out[part.rows] *= float("nan")


@breaks("hooks")
class ClaimsTreesWithoutMasks(GoodBackend):
    verify_mask = None


@breaks("trees-of-drafts")
class VerifiesTreesAsChains(GoodBackend):
    def branched(self, seen, tree):
        return seen


@breaks("trees-of-drafts")
class SeesOnlyTheTree(GoodBackend):
    def branched(self, seen, tree):
        return torch.cat((seen[:, : -len(tree)] & False, tree), 1)


@breaks("trees-of-drafts")
class SeesFromTheRootDown(GoodBackend):
    def branched(self, seen, tree):
        return super().branched(seen, tree.T)


@breaks("trees-of-drafts")
class KeepsMasksOnTheBackend(GoodBackend):
    def __init__(self, context) -> None:
        super().__init__(context)
        self.masks = torch.zeros(16, 5, 5, dtype=torch.bool)

    def room_for_trees(self, batch):
        return self.masks[: batch.num_decode_requests]


@breaks("trees-of-drafts")
class GivesTheMaskOfTheNextRequest(GoodBackend):
    @hookimpl
    def verify_mask(self, plan):
        (part,) = super().verify_mask(plan).parts
        turned = part.buffer.roll(1, 0)
        plan.trees.copy_(turned)
        return VerifyMask(parts=(MaskPart(part.requests, turned),))


@breaks("trees-of-drafts")
class HasMasksOfAllRequests(GoodBackend):
    def room_for_trees(self, batch):
        return torch.zeros(batch.num_requests + 1, batch.decode_len, batch.decode_len, dtype=torch.bool)


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


@breaks("ragged-lengths")
class TakesAllLengthsForEqual(GoodBackend):
    @hookimpl
    def plan_forward_metadata(self, batch) -> GoodPlan:
        count = max(1, batch.num_requests)
        equal = torch.full_like(batch.q_lens_cpu, batch.num_tokens // count)
        plan = super().plan_forward_metadata(dataclasses.replace(batch, q_lens_cpu=equal))
        return dataclasses.replace(plan, key=self.key(batch))


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
