"""The backend-scope hooks: what a live attention backend may be asked, per batch or once.

A backend marks each one that it implements with `hookimpl` and takes the arguments it needs, no more. What a missing one means
is in its docstring. `attend` is no hook: models are bound to it directly.
"""

from __future__ import annotations

from typing import Any

from enginery.contracts.batch import ForwardBatch
from enginery.contracts.latent import ChunkPlan, Denied, KVPiece
from enginery.contracts.plan import ForwardPlan
from enginery.plugin.hookspecs import hookspec


class BackendHooks:
    """All but the first are optional."""

    @hookspec(firstresult=True)
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ForwardPlan | None:
        """Plan one padded batch from its host tensors; once per batch, before the kernels. Absent: not allowed, every leaf plans.

        capture: the plan will be captured in a graph, so what it points to must stay where it is.
        """

    @hookspec(firstresult=True)
    def init_mha_chunk_metadata(
        self, batch: ForwardBatch, chunks: tuple[KVPiece, ...], disable_ragged: bool
    ) -> ChunkPlan | Denied | None:
        """Plan an MLA prefill over keys and values that the core makes from latents, piece by piece; once per batch, if at all.

        chunks: pieces of the cached prefix, or one piece with everything. disable_ragged: that one piece holds the step's own
        tokens too; otherwise plan a causal pass over them as well, whose piece is run first and has the index after the chunks'.
        Absent, or `Denied`: the core takes another strategy before it computes anything.
        """

    @hookspec(firstresult=True)
    def init_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool | None:
        """Allocate what captured graphs share, once before capture; True when done. Absent: the backend runs eagerly."""

    @hookspec(firstresult=True)
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool | None:
        """Bring a captured plan up to date for `batch`, on the host before each replay; True when done. Absent: nothing to do."""

    @hookspec(firstresult=True)
    def device_prologue(self, plan: ForwardPlan) -> bool | None:
        """Device work that begins each forward, inside the captured graph; True when done. Absent: nothing to do."""

    @hookspec(firstresult=True)
    def verify_mask(self) -> Any:
        """Where the mask of a draft tree is written for verification. Absent: chains are verified, trees are refused."""

    @hookspec(firstresult=True)
    def commit_state(self, accepted: Any) -> bool | None:
        """Keep the state after the accepted tokens of a verification; True when done. Absent: there is no such state."""

    @hookspec(firstresult=True)
    def indexer_metadata(self, layer: Any, batch: ForwardBatch) -> Any:
        """What a sparse layer's indexer needs for this batch. Absent: the backend is not sparse."""

    @hookspec(firstresult=True)
    def draft_steps_plan(self, batch: ForwardBatch, num_steps: int) -> tuple[ForwardPlan, ...] | None:
        """Plan the next `num_steps` decoding steps at once, of which `batch` is the first. Absent: each step is planned alone.

        The batches of the later steps have one token more per request each, on the pages of `batch`.
        """
