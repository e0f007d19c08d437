"""A plan is a value: what a backend computed on the host for one batch, and which batch that was; and what is given plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, runtime_checkable

from enginery.contracts.batch import Phase
from enginery.errors import StalePlan

if TYPE_CHECKING:
    import torch

    from enginery.contracts.attention import LayerSpec
    from enginery.contracts.batch import ForwardBatch


class PlanKey(NamedTuple):
    """Which batch a plan covers.

    backend: the id of the backend instance that made it. num_requests, num_tokens: as padded. batch: the batch's identity; equal
    sizes cover nothing. epoch: counts the times the backend's buffers were rebuilt; plans of an earlier epoch point at memory that
    is gone. capture: made to be captured in a graph; then decode_len and given say which batches the graph can be replayed for.
    """

    backend: str
    phase: Phase
    num_requests: int
    num_tokens: int
    batch: int
    epoch: int = 0
    capture: bool = False
    decode_len: int = 1
    given: tuple[str, ...] = ()

    @classmethod
    def of(cls, batch: ForwardBatch, backend: str, *, epoch: int = 0, capture: bool = False) -> PlanKey:
        """The key of a plan for this batch."""
        of_graphs = (batch.decode_len, batch.given) if capture else (1, ())
        values = (backend, batch.phase, batch.num_requests, batch.num_tokens, batch.identity, epoch, capture, *of_graphs)
        return tuple.__new__(cls, values)  # a third of what the generated constructor costs, a dozen times a step

    def covers(self, batch: ForwardBatch, backend: str, *, epoch: int, capture: bool) -> bool:
        """Whether it is the key of a plan for this batch: equal to what `of` makes, without the making."""
        of_graphs = (batch.decode_len, batch.given) if capture else (1, ())
        return self == (backend, batch.phase, batch.num_requests, batch.num_tokens, batch.identity, epoch, capture, *of_graphs)

    def replays(self, batch: ForwardBatch) -> bool:
        """Whether a captured step of this key can run `batch` once its plan is refreshed: all is the same but the identity, and of
        a mixed one the number of requests."""
        mixed = self.phase is batch.phase is Phase.MIXED
        sizes = (batch.phase, self.num_requests if mixed else batch.num_requests, batch.num_tokens)
        return self == (self.backend, *sizes, self.batch, self.epoch, True, batch.decode_len, batch.given)


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardPlan:
    """The parent of every backend's plan. Immutable: two batches may be planned before either runs.

    Captured plans of one backend may share memory unless they are in one graph.
    """

    key: PlanKey


@dataclass(frozen=True, kw_only=True, eq=False)
class Accepted:
    """What became of a verification. counts: [B] int64, device: how many rows of each request behind its first one stand.

    Of a request that verifies drafts these are the accepted ones; of any other all of its rows, whose states have moved already.
    """

    counts: torch.Tensor


class MaskPart(NamedTuple):
    """requests: of the batch. buffer: [requests, N, N] bool, device: which of their last N keys each of their N rows sees."""

    requests: slice
    buffer: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class VerifyMask:
    """Where the masks of draft trees are written before a verification runs: a leaf has one part, with N `decode_len`.

    A row sees all keys before the last N, and of these its own and those of the rows on its way from the first.
    """

    parts: tuple[MaskPart, ...]


class IndexerPart(NamedTuple):
    """Some rows of a batch. page_table: [requests, P]; row_request, row_lens: [rows], a row's request and keys; int32, device."""

    rows: slice
    page_table: torch.Tensor
    row_request: torch.Tensor
    row_lens: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexerPlan:
    """What the indexer of sparse layers needs for one planned batch: a leaf has one part."""

    parts: tuple[IndexerPart, ...]


PlanT = TypeVar("PlanT", bound=ForwardPlan)


def covering_plan(plan: ForwardPlan, batch: ForwardBatch, kind: type[PlanT], *, backend: str, epoch: int = 0) -> PlanT:
    """The plan, if it is of this kind and was made by `backend` in `epoch` for this very batch.

    Raises `StalePlan` otherwise. Every `attend` and `advance` begins with it.
    """
    if not isinstance(plan, ForwardPlan):
        raise StalePlan(f"{plan!r:.100} is no plan; {backend} is to run a batch of {batch.num_requests} requests")
    if not isinstance(plan, kind) or not plan.key.covers(batch, backend, epoch=epoch, capture=plan.key.capture):
        wanted = PlanKey.of(batch, backend, epoch=epoch, capture=plan.key.capture)
        raise StalePlan(
            f"the plan is a {type(plan).__name__} made for {plan.key}, but {wanted} is to run; plan after padding and before "
            "attend, with the backend that runs"
        )
    return plan


@runtime_checkable
class Attends(Protocol):
    """A backend of softmax-attention layers."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerSpec,
        batch: ForwardBatch,
        plan: ForwardPlan,
        out: torch.Tensor,
    ) -> None:
        """Attend causally over the pool and write to `out`. The step's own keys and values are in the pool already.

        q: [T, H, D]; k: [T, K, D]; v: [T, K, value_dim]; out: [T, H, value_dim]; all in the model's dtype on the device. plan: what
        this backend planned for this batch; raises `StalePlan` if it is not.
        """


@runtime_checkable
class Advances(Protocol):
    """A backend of recurrent layers."""

    def advance(
        self, mixed: torch.Tensor, gates: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, plan: ForwardPlan, out: torch.Tensor
    ) -> None:
        """Move the states of the batch's requests on by its tokens, and write what each token reads of them to `out`.

        mixed: [T, C], gates: [T, G], see `RecurrentFacts`, as they leave the layer's products: convolution, norms of q and k, and
        what becomes of gates are computed here. A row may have a stride. out: [T, HV, value_dim], contiguous. All are in the
        model's dtype, on the device. To advance one batch twice moves states on twice. Raises `StalePlan` as `attend` does.

        Where `batch.decode_len` is above 1, the leading `num_decode_requests` verify drafts: their rows are computed from the
        state, which does not move before the `commit_state` hook says how many of them stand.
        """
