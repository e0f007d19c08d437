"""Building an engine, from top to bottom: each part after what it requires, which its parameters name and its type checks.

What can be refused is refused before weights are read. Memory is planned before it is taken. The weights come before the KV pool,
because they need the most memory while they are loaded. The sparse coordinator comes before the attention backends, which are given
it in their context.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import torch

from enginery.attention.relay import BackendRelay
from enginery.attention.socket import LayerSocket
from enginery.config.schema import Decision, EngineOptions
from enginery.contracts.attention import CoordinatorContext, SparseCoordinator
from enginery.contracts.batch import WINDOW, MemoryKind
from enginery.contracts.engine import BuildProgress, EngineFacts, ReportProgress, report_to_nobody
from enginery.contracts.ops import OpTable
from enginery.contracts.parallel import WHOLE, ParallelFacts
from enginery.engine.changeover import Changeover
from enginery.errors import ConfigError
from enginery.kv.pool import PagedKVPool, page_bytes
from enginery.kv.states import state_bytes
from enginery.nn.expert_loads import ExpertLoads
from enginery.plugin.boundary import inside
from enginery.plugin.registry import Registry
from enginery.worker.backends import AttentionParts, build_backend
from enginery.worker.choice import Checkpoint, Choice, choose
from enginery.worker.drafts.draft_model import DraftModel
from enginery.worker.drafts.draws import ForcedAcceptance
from enginery.worker.drafts.parts import DraftNeeds, build_draft_model, find_draft_needs, tapped_outputs
from enginery.worker.loading import NeededWeights, build_model, check_weights, load_weights, rank_setting
from enginery.worker.memory_plan import (
    NCCL_BYTES,
    SAMPLING_COPIES,
    MemoryPlan,
    OtherKinds,
    largest_window,
    no_pages,
    plan_memory,
    with_pages,
    workspace_bytes,
)
from enginery.worker.op_table import blaming, load_table
from enginery.worker.page_tables import PageTables
from enginery.worker.paths.capture import capture_steps
from enginery.worker.paths.recorded_steps import recorded_sizes
from enginery.worker.paths.results import StepParts
from enginery.worker.ranks.collectives import Met
from enginery.worker.runner import Captured, Runner
from enginery.worker.token_feed import NamedTensors, TokenFeed
from enginery.worker.warm_up import warm_up

if TYPE_CHECKING:
    from enginery.engine.kv_events.publisher import KVEvents

log = logging.getLogger(__name__)

StartPhase = Literal[
    "choice", "ops", "needed weights", "memory", "weights", "pool", "attention", "model", "warm up", "graphs", "pieces", "grammars"
]


@dataclass(frozen=True, kw_only=True, eq=False)
class BuiltParts:
    """Everything that an engine runs with. step, captured: what its steps run with, and as.

    phases_s: seconds of each phase of the start that took more than a millisecond.
    """

    choice: Choice
    memory: MemoryPlan
    step: StepParts
    captured: Captured
    loads: ExpertLoads | None
    changeover: Changeover | None
    draft_model: DraftModel | None
    phases_s: Mapping[str, float]

    def facts(self) -> EngineFacts:
        choice, memory = self.choice, self.memory
        return EngineFacts(
            model_name=choice.checkpoint.name,
            served_names=choice.checkpoint.names,
            folder=str(choice.checkpoint.folder),
            tokenizer_folder=str(choice.checkpoint.tokenizer_folder),
            note=choice.checkpoint.note,
            max_model_len=choice.settings.max_model_len,
            vocab_size=choice.facts.vocab_size,
            dtype=choice.settings.dtype,
            attn_backend=choice.attention.name,
            num_pages=choice.parallel.num_lanes * memory.num_pages,
            page_size=memory.page_size,
            eos_token_ids=tuple(sorted(choice.checkpoint.eos_token_ids)),
            considered=choice.considered,
            decisions=tuple((decision.setting, decision.value, decision.reason) for decision in choice.decisions),
            memory_plan=str(memory),
            phases_s=dict(self.phases_s),
        )


class Place(NamedTuple):
    """Of a process among several ranks. meet: called with what it has chosen, when the others may be waited for."""

    parallel: ParallelFacts
    meet: Callable[[Choice], Met]


ALONE: Final = Place(WHOLE, lambda _: Met())


class Phases:
    """Reports each phase of a start when it begins, and measures it."""

    def __init__(self, report: ReportProgress) -> None:
        self._report = report
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: StartPhase) -> Iterator[None]:
        """What runs inside is this phase."""
        self._report(BuildProgress(phase=phase))
        began = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - began


def build_parts(
    asked: EngineOptions,
    registry: Registry,
    report: ReportProgress = report_to_nobody,
    *,
    pages: Mapping[MemoryKind, int] = MappingProxyType({}),
    place: Place = ALONE,
    found: Checkpoint | None = None,
    forced_rates: Sequence[float] = (),
) -> BuiltParts:
    """Choose, check, plan, load and bind, or raise `EnginError`. pages: so many of these kinds of memory, whatever would fit.

    forced_rates: see `ForcedAcceptance`.
    """
    phases = Phases(report)
    with phases("choice"):
        chosen = choose(asked, registry, parallel=place.parallel, found=found)
        met = place.meet(chosen)
    with phases("ops"):
        ops = load_ops(asked, chosen)
    with phases("needed weights"):
        needed = check_weights(chosen)
        chosen, draft = find_draft(asked, registry, chosen, met)
    with phases("memory"):
        memory = met.smallest(plan_sizes(asked, chosen, needed, draft))
        choice = fit_context(chosen, memory)
    with phases("weights"):
        weights = load_weights(asked, choice, needed, report)
    with phases("pool"):
        pool = PagedKVPool(with_pages(no_pages(choice), memory, max_requests=choice.num_seats, asked=pages), choice.device)
    with phases("attention"):
        attention = AttentionParts(asked, choice, registry, pool=pool, coordinator=build_coordinator(choice, registry, pool))
        relay = build_backend(attention, choice.first_attention or choice.attention, micro_batches=asked.micro_batches)
        socket, changeover = LayerSocket(relay), begin_changeover(asked, attention)
    with phases("model"):
        comm = met.collectives(ops, choice)
        setting = rank_setting(choice, needed.reader, ops=ops, comm=comm, loads=expert_loads(choice))
        model = build_model(choice, weights, setting, pool=pool, socket=socket)
        drafter = build_draft_model(asked, registry, draft, target=choice, model=model, setting=setting, pool=pool, socket=socket)
        model, joined = met.joined(model, choice, comm)
    feed = TokenFeed(pool.geometry.num_seats, choice.device, named=named_tensors(choice), most_drafts=choice.most_drafts)
    forced = ForcedAcceptance(forced_rates, choice.device) if forced_rates else None
    step = StepParts(model, joined, ops, socket, feed, pool, choice.results, forced)
    with phases("warm up"):
        if choice.device.type == "cuda":
            torch.cuda.empty_cache()  # what loading held for a while: libraries allocate beside torch
            run_once(choice, step)
    return BuiltParts(
        choice=choice,
        memory=memory,
        step=step,
        captured=capture_steps(phases, choice, step, met, draft, drafter),
        loads=setting.loads,
        changeover=changeover,
        draft_model=drafter,
        phases_s={phase: seconds for phase, seconds in phases.seconds.items() if seconds > 0.001},
    )


def build_runner(parts: BuiltParts) -> Runner:
    """What runs the steps."""
    tables, model, siblings = PageTables(parts.step.pool.geometry), parts.draft_model, parts.choice.draft_siblings
    return Runner(parts.step, tables=tables, captured=parts.captured, draft_model=model, siblings=siblings)


def load_ops(asked: EngineOptions, choice: Choice) -> OpTable:
    """The references, overridden by what the chosen plugins load, the highest priority last."""
    if asked.num_threads is not None:
        torch.set_num_threads(asked.num_threads)
    return load_table(choice.ops, choice.op_needs, choice.device)


def expert_loads(choice: Choice) -> ExpertLoads | None:
    """Where experts are divided, and this rank tells of it."""
    parallel = choice.parallel
    if not parallel.cuts_experts or parallel.rank:
        return None
    return ExpertLoads(parallel.over_lanes().tensor_size, choice.device)


def find_draft(asked: EngineOptions, registry: Registry, choice: Choice, met: Met) -> tuple[Choice, DraftNeeds | None]:
    """The choice with what the target writes for a model that drafts, and what that needs; None where none does."""
    draft = find_draft_needs(asked, registry, choice)
    if draft is None:
        return choice, None
    met.compare(draft.choice, what="draft models")
    return dataclasses.replace(choice, taps=draft.taps), draft


def named_tensors(choice: Choice) -> NamedTensors:
    """Room for the inputs and outputs that only this model knows."""
    settings, facts = choice.settings, choice.facts
    max_tokens = max(settings.max_batch_tokens, settings.max_graph_requests, settings.max_piece_tokens)
    outputs, max_requests = (*facts.outputs, *tapped_outputs(choice)), settings.max_batch_requests
    with inside(choice.family, "give its model's inputs and outputs room"):
        return NamedTensors(facts.inputs, outputs, max_tokens=max_tokens, max_requests=max_requests, device=choice.device)


def plan_sizes(asked: EngineOptions, choice: Choice, needed: NeededWeights, draft: DraftNeeds | None) -> MemoryPlan:
    """How many pages fit beside everything else."""
    facts, settings = choice.facts, choice.settings
    geometry = no_pages(choice)
    sampled_in_place = any("draw_rows" in offer.spec.provides for offer in choice.ops)
    memory = plan_memory(
        asked,
        settings,
        choice.device_facts,
        weights=needed.record.num_bytes() + (0 if draft is None else draft.needed.record.num_bytes()),
        workspace=(0 if draft is None else draft.workspace_bytes)
        + workspace_bytes(
            settings,
            facts,
            backend_bytes=backend_bytes(choice),
            itemsize=choice.dtype.itemsize,
            sampling_copies=0 if sampled_in_place else SAMPLING_COPIES,
            num_lanes=choice.parallel.num_lanes,
        ),
        page_bytes=page_bytes(geometry) + (0 if draft is None else draft.page_bytes),
        others=OtherKinds(
            window=largest_window(choice), window_page_bytes=page_bytes(geometry, WINDOW), state_bytes=state_bytes(geometry)
        ),
    )
    log.debug("memory plan: %s", memory)
    return memory


def backend_bytes(choice: Choice) -> int:
    """What the attention backends' workspaces take, and all else that is kept beside a step's own tensors."""
    facts, settings = choice.facts, choice.settings
    found = sum(offer.spec.capabilities.workspace_bytes for attention in choice.attentions for offer in attention.by_role.values())
    if choice.drafter is not None:
        # Recurrent layers keep, in float32, the rows that verify drafts until it is known how many of them stand: those of an eager
        # step, and for good those of a captured one.
        kept = sum(4 * (rule.mixed_width + rule.gates_width) for layer in facts.layers if (rule := layer.recurrent) is not None)
        found += (settings.max_batch_requests + settings.max_graph_requests) * kept
    if choice.device.type == "cpu":
        # Recordings of decoding steps keep for each size logits, and of every layer twice what is alive at once.
        rows = choice.parallel.num_lanes * sum(recorded_sizes(settings.max_graph_requests))
        return found + rows * (2 * facts.num_decoder_layers * facts.activation_width + facts.vocab_size) * choice.dtype.itemsize
    return found + exchange_bytes(choice)


def exchange_bytes(choice: Choice) -> int:
    """What exchanges with other ranks take on a GPU: NCCL's buffers, and memory that ranks reach of each other."""
    if choice.parallel.num_ranks == 1:
        return 0
    offered, num_ranks = [offer.spec.peer_ops for offer in choice.ops], choice.parallel.tensor_size
    return NCCL_BYTES + max((spec.bytes_of_each(num_ranks) for spec in offered if spec is not None), default=0)


def fit_context(choice: Choice, memory: MemoryPlan) -> Choice:
    """A context longer than all KV pages together could never be filled: promise no more than they hold."""
    held = memory.num_pages * memory.page_size
    if held >= choice.settings.max_model_len:
        return choice
    if held < 2:
        raise ConfigError(f"the KV pages hold {held} token, but the shortest request has one and is given one; raise --num-pages")
    decision = Decision(
        setting="max_model_len", value=str(held), reason="all that the KV pages hold; more memory or --num-pages raise it"
    )
    kept = tuple(made for made in choice.decisions if made.setting != decision.setting)
    settings = dataclasses.replace(choice.settings, max_model_len=held)
    return dataclasses.replace(choice, settings=settings, decisions=(*kept, decision))


def build_coordinator(choice: Choice, registry: Registry, pool: PagedKVPool) -> SparseCoordinator | None:
    """None: sparse KV is configured off."""
    if choice.coordinator is None:
        return None
    name = choice.coordinator.name
    context = CoordinatorContext(
        instance=f"{name}#0",
        geometry=pool.geometry,
        pool=pool,
        device=choice.device,
        parallel=choice.parallel,
        options=registry.options_for(name),
    )
    return registry.create_sparse_coordinator(name, context)


def begin_changeover(asked: EngineOptions, attention: AttentionParts) -> Changeover | None:
    """Compile what the chosen backends lack, beside the engine. None: the engine begins with the chosen backends."""
    choice = attention.choice
    if choice.first_attention is None:
        return None

    def build() -> BackendRelay:
        with torch.cuda.device(choice.device) if choice.device.type == "cuda" else contextlib.nullcontext():
            return build_backend(attention, choice.attention, micro_batches=asked.micro_batches)

    return Changeover(attention.registry, choice, build=build)


def run_once(choice: Choice, step: StepParts) -> None:
    """Compile the kernels of every kind of step before the engine is ready."""
    longest = min(choice.settings.max_batch_tokens, choice.settings.max_model_len)
    with blaming(step.ops, choice.ops, choice.op_needs, choice.device):
        warm_up(step, longest=longest)


def kv_events_of(asked: EngineOptions, parts: BuiltParts) -> list[KVEvents]:
    """What tells routers which prefixes each lane has. Where nobody asked for it, nothing, and nothing is imported for it."""
    if asked.kv_events is None:
        return []
    from enginery.engine.kv_events.blocks import groups_of
    from enginery.engine.kv_events.publisher import KVEvents

    choice, memory = parts.choice, parts.memory
    groups = groups_of(has_latents=choice.facts.has_latents, window=memory.window, has_states=memory.state_pages > 0)
    medium = "CPU" if choice.device.type == "cpu" else "GPU"
    lanes: list[KVEvents] = []
    try:
        for lane in range(asked.dp_attention):
            lanes.append(KVEvents(asked, lane=lane, medium=medium, groups=groups))
    except BaseException:
        for made in lanes:
            made.close()
        raise
    return lanes
