"""What of a model's steps is captured as CUDA graphs when an engine is built: decoding, a draft model behind it, and the others.

Each is captured as far as its backends can be; what is not runs eagerly. On a CPU decoding steps of few requests are recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

import torch

from enginery.contracts.attention import AttnBackendSpec
from enginery.contracts.batch import FULL
from enginery.contracts.ops import OpSpec
from enginery.errors import Unsupported
from enginery.plugin.records import Offer
from enginery.plugin.selection import op_winners
from enginery.worker.choice import Choice
from enginery.worker.drafts.draft_graphs import DraftGraphs
from enginery.worker.drafts.draft_model import DraftModel
from enginery.worker.drafts.parts import DraftNeeds
from enginery.worker.paths.captured_step import Head, takes_graphs
from enginery.worker.paths.cuda_capture import CudaCapture
from enginery.worker.paths.decode_capture import DecodeCapture, Speculation
from enginery.worker.paths.decode_graphs import DecodeGraphs, LogitsHead
from enginery.worker.paths.host_capture import HostCapture
from enginery.worker.paths.mixed_graphs import MixedGraphs, most_keys
from enginery.worker.paths.piecewise_capture import CudaPiecewiseCapture
from enginery.worker.paths.recorded_steps import RecordedHead, RecordedSteps
from enginery.worker.paths.results import StepParts
from enginery.worker.ranks.collectives import Met
from enginery.worker.ranks.path import ColumnsHead
from enginery.worker.runner import Captured

log = logging.getLogger(__name__)

_Used = list[Offer[OpSpec] | Offer[AttnBackendSpec]]  # all that may be called in a step
Phases = Callable[[Literal["graphs", "pieces"]], AbstractContextManager[None]]  # says and measures what its context holds


def capture_steps(
    phases: Phases, choice: Choice, parts: StepParts, met: Met, draft: DraftNeeds | None, draft_model: DraftModel | None
) -> Captured:
    """A draft model whose steps cannot be captured runs eagerly behind the target's that are; all do where one is `Unsupported`."""
    if not choice.settings.max_graph_requests:
        return Captured()
    if choice.device.type == "cpu":
        return Captured(_recorded_steps(choice, parts, guesses=draft_model is not None))
    try:
        return _capture_on_devices(phases, choice, parts, met, draft, draft_model)
    except Unsupported as error:  # the same on all ranks of a stage
        log.warning("all steps run eagerly, which makes decoding slow: %s", error)
        return Captured()


def _capture_on_devices(
    phases: Phases, choice: Choice, parts: StepParts, met: Met, draft: DraftNeeds | None, draft_model: DraftModel | None
) -> Captured:
    """On GPUs: the largest, and one that verifies if anything guesses; with one rank the others when needed, or in idle moments.

    Each rank of a stage takes part in the exchanges of each capture. In idle moments others would not, so ranks capture all plain
    steps and pieces here. Those that verify, and a draft model's, are too many, one of each size and number of guesses, and are
    captured when needed: what each rank has captured follows from the steps that it has run, the same in one order. So nothing is
    captured but here and in a step, and none is launched before the one in front of it is told, which the first rank alone knows.
    """
    capture = CudaCapture(choice.device, met.together)
    alone, most = met.outside(capture), choice.settings.max_graph_requests
    with phases("graphs"):
        drafts = None if draft is None or draft_model is None else _draft_graphs(draft_model, draft, choice, parts, capture)
        keeps, shape = draft is not None and not draft.taps, (most, choice.facts.hidden_size)
        speculation = Speculation(
            hidden=torch.empty(shape, dtype=choice.dtype, device=choice.device) if keeps else None,
            siblings=choice.draft_siblings,
            most_starts=0 if drafts is None else _most_starts(choice, parts, draft),
            most_positions=choice.settings.max_model_len,
        )
        num_ranks, head = choice.parallel.num_ranks, _head(choice, parts)
        steps = DecodeCapture(parts, most, head=head, record=alone, speculation=speculation, num_ranks=num_ranks)
        graphs = DecodeGraphs.build(steps)
        if graphs is None:
            return Captured()
        _prepare(graphs, drafts, choice)
    if not choice.settings.max_piece_tokens:
        return Captured(graphs, None, drafts)
    with phases("pieces"):
        return Captured(graphs, _mixed_graphs(choice, parts, capture), drafts)


def _prepare(graphs: DecodeGraphs, drafts: DraftGraphs | None, choice: Choice) -> None:
    while drafts is not None and drafts.prepare(graphs.captured.values(), lambda _: choice.draft_length):
        pass
    for key in reversed(graphs.waiting()) if choice.parallel.num_ranks > 1 else ():  # the smaller fit into the others' memory
        graphs.provide(key)


def _why_not_recorded(choice: Choice, parts: StepParts, used: _Used, *, guesses: bool) -> str | None:
    """None: steps can be recorded, as far as can be known before."""
    if guesses and parts.joined is not None:
        return "a draft model guesses on several ranks"
    if choice.coordinator is not None:
        return "the sparse coordinator is asked in each layer"
    silent = [f"{offer.name}, from {offer.source}" for offer in used if offer.spec.record_calls is None]
    return f"{'; '.join(dict.fromkeys(silent))}, states no record_calls" if silent else None


def _recorded_steps(choice: Choice, parts: StepParts, *, guesses: bool) -> RecordedSteps | None:
    """None, with the reason in the log: something chosen does not tell its calls, or a backend cannot be captured."""
    used: _Used = [*op_winners(choice.ops).values(), *(offer for chosen in choice.attentions for offer in chosen.by_role.values())]
    if (why := _why_not_recorded(choice, parts, used, guesses=guesses)) is not None:
        log.debug("decoding runs eagerly: %s", why)
        return None
    tellers, most = [tell for offer in used if (tell := offer.spec.record_calls) is not None], choice.settings.max_graph_requests
    head: Head | None = None
    if parts.joined is not None:  # what is chosen from hidden states is of all ranks
        tellers += [group.record_calls for group in parts.joined.exchanges]
    else:
        head = RecordedHead(parts, most)
    return RecordedSteps.build(DecodeCapture(parts, most, head=head, record=HostCapture(tellers), fills=False))


def _draft_graphs(
    model: DraftModel, needs: DraftNeeds, choice: Choice, parts: StepParts, capture: CudaCapture
) -> DraftGraphs | None:
    """None, with the reason in the log: it cannot be captured."""
    if not model.can_be_captured:
        log.info("the draft model runs eagerly: it is a chain of modules, or reads the target's keys and values")
        return None
    shape = (choice.settings.max_graph_requests, needs.choice.facts.hidden_size)
    state = torch.zeros(shape, dtype=needs.choice.dtype, device=choice.device)
    if not takes_graphs(model.relay, len(state), what="the draft model"):
        return None
    return DraftGraphs(model, parts, capture=capture, state=state, siblings=choice.draft_siblings)


def _head(choice: Choice, parts: StepParts) -> Head | None:
    """None: of lanes, where what is chosen from hidden states is of all ranks, and of stages before the last."""
    most = choice.settings.max_graph_requests
    if choice.parallel.num_lanes > 1 or not choice.parallel.is_last_stage:
        return None
    return LogitsHead(parts, most) if parts.joined is None else ColumnsHead(parts, parts.joined, most)


def _most_starts(choice: Choice, parts: StepParts, draft: DraftNeeds | None) -> int:
    """With one rank, and all keys in pages of one kind: of all requests, or one, where what verifies plans without lengths."""
    geometry = parts.pool.geometry
    if draft is None or choice.parallel.num_ranks > 1 or any(geometry.kind_of(layer) != FULL for layer in geometry.layers):
        return 0
    chosen = [*choice.attentions, draft.choice.attention]
    alone, together = (not any(each.plans_late(one=one) for each in chosen) for one in (True, False))
    return choice.settings.max_graph_requests if together else int(alone)


def _mixed_graphs(choice: Choice, parts: StepParts, capture: CudaCapture) -> MixedGraphs:
    hidden = torch.empty((choice.settings.max_piece_tokens, choice.facts.hidden_size), dtype=choice.dtype, device=choice.device)
    pieces = MixedGraphs(
        parts,
        hidden,
        capture=CudaPiecewiseCapture(capture),
        whole=capture,
        most_requests=choice.settings.max_graph_requests,
        in_pieces_too=choice.draft_siblings > 0 or choice.settings.max_model_len > most_keys(parts.pool.geometry),
    )
    for key in reversed(pieces.waiting()) if choice.parallel.num_ranks > 1 else ():
        pieces.provide(key)
    return pieces
