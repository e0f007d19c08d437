"""As bad_backends: what goes wrong with states, and with drafts that are verified."""

from __future__ import annotations

import dataclasses

import torch
from core.testing.bad_backends import breaks
from core.testing.good_backend import GoodBackend

from enginery.api import Accepted, MaskPart, VerifyMask, hookimpl


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
