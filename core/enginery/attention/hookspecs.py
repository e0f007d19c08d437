"""The backend-scope hooks: what a live attention backend may be asked, per batch or once.

A backend marks each one that it implements with `hookimpl` and takes the arguments it needs, no more. What a missing one means
is in its docstring. `attend` and `advance` are no hooks: they are called for each layer.
"""

from __future__ import annotations

from enginery.contracts.batch import ForwardBatch
from enginery.contracts.latent import ChunkPlan, Denied, KVPiece
from enginery.contracts.plan import Accepted, ForwardPlan, IndexerPlan, VerifyMask
from enginery.plugin.hookspecs import hookspec


class BackendHooks:
    """All but the first are optional. A plan that a hook is given is one that this backend made."""

    @hookspec(firstresult=True)
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ForwardPlan | None:
        """Plan one padded batch from its host tensors; once per batch, before the kernels. Absent: not allowed, every leaf plans.

        capture: the plan will be captured in a graph, so what it points to must stay where it is; the batch is then one that only
        decodes or verifies, with `decode_len` rows of each request, or, after `init_mixed_graph_state`, a mixed one of so many rows
        and no request yet, whose decoding ones will have `decode_len` each (raise `Unsupported` if that is too many). A plan that
        was made otherwise is never captured, nor is a captured one attended with after it was refreshed.
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
    def init_mixed_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool | None:
        """Allocate what captured prefills and mixed steps share, after `init_graph_state`; True when done. Absent: what such steps
        do between calls of attention is captured, and attention runs eagerly.
        """

    @hookspec(firstresult=True)
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool | None:
        """Bring a captured plan up to date for `batch`, on the host, right before a replay; True when done. Absent: nothing to do.

        The batch agrees with the one that was captured in phase, sizes, `decode_len` and in which optional fields it has. A mixed
        one has as many rows, of which the last may be no request's and are zero in `out`, and up to `max_batch_size` requests, of
        which none decodes, some or all; where there is no room for them, raise `Unsupported` before anything is changed.
        """

    @hookspec(firstresult=True)
    def device_prologue(self, plan: ForwardPlan) -> bool | None:
        """Device work that begins each forward, inside the captured graph; True when done. Absent: nothing to do."""

    @hookspec(firstresult=True)
    def verify_mask(self, plan: ForwardPlan) -> VerifyMask | None:
        """Where the masks of draft trees are written for a planned batch with `trees`; asked once, before its layers attend.

        Of its leading `num_decode_requests`, which verify, or are chunks as long. What is written is in place of the causal mask
        among their last keys. Requests behind them, and batches without `trees`, are causal. Absent: chains are verified, trees are
        refused.
        """

    @hookspec(firstresult=True)
    def commit_state(self, plan: ForwardPlan, accepted: Accepted) -> bool | None:
        """Move the states of requests that verified drafts on by their first row and the accepted ones; True when done.

        Once for each plan, after all layers have advanced; what they were given is kept until then. A second time raises
        `StalePlan`. Afterwards whoever reads the pages that the batch's `StateView` names for writing, and for checkpoints, finds
        the states there. Device work alone. Absent: the backend keeps no states, or does not claim `Phase.VERIFY`.
        """

    @hookspec(firstresult=True)
    def indexer_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> IndexerPlan | None:
        """What the indexer of sparse layers needs for this planned batch; once per batch. Absent: the backend is not sparse."""

    @hookspec(firstresult=True)
    def draft_steps_plan(self, batches: tuple[ForwardBatch, ...], capture: bool) -> tuple[ForwardPlan, ...] | None:
        """Plan several decoding steps at once, a plan for each batch; the plans may share tables. Absent: each is planned alone.

        Those of later steps have one token more per request each; slots past the last page that a request owns are scratch. Lengths
        may be true on the device alone (`kv_lens`); those of the host are then not below them, and the last batch's the largest.
        Plans that are captured are refreshed by the last one's alone.
        """
