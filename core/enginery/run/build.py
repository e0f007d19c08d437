"""Building an engine, in the one order there is.

device -> settings -> attention backend chosen -> weights recorded and checked -> memory planned -> weights -> pool -> sparse
coordinator -> arena -> attention backend -> model bound to it. What can be refused is refused before weights are read.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from enginery.attention.relay import BackendRelay
from enginery.config.checkpoint_folder import find_folder, read_config
from enginery.config.needs import attn_needs
from enginery.config.resolve import DeviceFacts, Settings, resolve
from enginery.config.schema import Decision, EngineOptions
from enginery.contracts.attention import AttnBackendSpec, BackendContext, KVGeometry, ParallelFacts
from enginery.contracts.model import AttendFn, Model, ModelContext, ModelFacts, ModelSpec, WeightSource, WriteKVFn
from enginery.contracts.ops import OpNeeds, OpSpec, OpTable
from enginery.memory.arena import DeviceArena
from enginery.memory.pool import PagedKVPool, page_bytes
from enginery.nn.reference_ops import reference_ops
from enginery.plugin.boundary import inside
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery.run.checkpoint_files import StoredTensor, scan_checkpoint
from enginery.run.device import device_facts, torch_device
from enginery.run.memory_plan import MemoryPlan, plan_memory, workspace_bytes
from enginery.run.weights import WeightRecord, check, load, random_weights
from enginery.text.tokenizer import read_json

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Where the model comes from. random: it has no weights of its own."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    eos_token_ids: frozenset[int]
    note: str
    random: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """What was decided before anything heavy happened."""

    checkpoint: Checkpoint
    family: Offer[ModelSpec]
    facts: ModelFacts
    device_facts: DeviceFacts
    device: torch.device
    settings: Settings
    attention: Offer[AttnBackendSpec]
    op_needs: OpNeeds
    ops: tuple[Offer[OpSpec], ...]
    decisions: tuple[Decision, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The settings' dtype as torch knows it."""
        dtype: torch.dtype = getattr(torch, self.settings.dtype)
        return dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class BuiltParts:
    """Everything that an engine runs with."""

    choice: Choice
    memory: MemoryPlan
    relay: BackendRelay
    model: Model
    phases_s: Mapping[str, float]


class PhaseClock:
    """Times the phases of the start."""

    def __init__(self) -> None:
        self.phases_s: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """End `phase` now."""
        now = time.perf_counter()
        self.phases_s[phase] = now - self._last
        self._last = now


def build_parts(asked: EngineOptions, registry: Registry) -> BuiltParts:
    """Choose, check, plan, load and bind. Raises `EnginError` with the reason if any of it is impossible."""
    clock = PhaseClock()
    choice = choose(asked, registry)
    if asked.num_threads is not None:
        torch.set_num_threads(asked.num_threads)
    ops = op_table(choice)
    clock.lap("choose")
    record, stored = check_weights(choice)
    geometry = KVGeometry(num_pages=0, page_size=asked.page_size, layers=choice.facts.layers, dtype=choice.settings.dtype)
    memory = plan(asked, choice, weights_bytes=record.num_bytes(), geometry=geometry)
    log.info("memory plan: %s", memory)
    choice = fit_context(choice, memory)
    clock.lap("check and plan")
    weights = random_weights(record, choice.device, seed=asked.seed) if stored is None else load(record, stored, choice.device)
    clock.lap("weights")
    pool = PagedKVPool(dataclasses.replace(geometry, num_pages=memory.num_pages), choice.device)
    relay = create_backend(choice, registry, pool)
    with torch.inference_mode(), inside(choice.family, "build the model"):
        model = choice.family.spec.build(
            model_context(choice, weights, ops=ops, attend=relay.backend.attend, write_kv=pool.write, device=choice.device)
        )
    clock.lap("build")
    return BuiltParts(choice=choice, memory=memory, relay=relay, model=model, phases_s=clock.phases_s)


def choose(asked: EngineOptions, registry: Registry) -> Choice:
    """Everything that can be decided, and refused, from configuration and facts alone."""
    checkpoint = find_checkpoint(asked, registry)
    family = registry.find_model(checkpoint.config["architectures"])
    with inside(family, f"describe the model in {checkpoint.folder}"):
        facts = family.spec.describe(checkpoint.config)
    device = device_facts(asked.device, asked.num_threads)
    settings = resolve(asked, device, facts, config=checkpoint.config)
    where: dict[str, Any] = dict(device=device.kind, dtype=settings.dtype, compute_capability=device.compute_capability)
    selection = registry.select_attn_backend(asked.attention_backend, attn_needs(facts, page_size=asked.page_size, **where))
    for candidate in selection.candidates:
        log.info("attention backend %s", candidate)
    attention = selection.winner
    op_needs = OpNeeds(**where)
    ops = registry.select_ops(op_needs)
    reason = "asked for" if asked.attention_backend != "auto" else "highest priority that refuses nothing"
    return Choice(
        checkpoint=checkpoint,
        family=family,
        facts=facts,
        device_facts=device,
        device=torch_device(asked.device),
        settings=settings,
        attention=attention,
        op_needs=op_needs,
        ops=ops,
        decisions=(
            Decision(setting="model", value=checkpoint.name, reason=checkpoint.note or str(checkpoint.folder)),
            Decision(setting="family", value=family.name, reason=f"by architecture, from {family.source}"),
            *settings.decisions,
            Decision(setting="attention", value=attention.spec.name, reason=f"{reason}, from {attention.source}"),
            *(
                Decision(setting="ops", value=f"{offer.spec.name}: {', '.join(offer.spec.provides)}", reason=f"from {offer.source}")
                for offer in ops
            ),
        ),
    )


def find_checkpoint(asked: EngineOptions, registry: Registry) -> Checkpoint:
    """The checkpoint asked for, or the best that is installed."""
    model = registry.default_checkpoint().name if asked.model is None else asked.model
    folder = find_folder(model, registry)
    offer = registry.checkpoint(model)
    shipped = offer.spec if offer and offer.spec.folder == folder else None
    config = read_config(folder)
    return Checkpoint(
        folder=folder,
        name=asked.served_model_name or model,
        config=config,
        eos_token_ids=_eos_token_ids(folder, config),
        note=shipped.note if shipped else "",
        random=asked.load_format == "dummy" or (shipped is not None and shipped.random_weights),
    )


def _eos_token_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """generation_config.json states it, else config.json; one id or several."""
    stated = read_json(folder / "generation_config.json").get("eos_token_id")
    stated = config.get("eos_token_id") if stated is None else stated
    if stated is None:
        return frozenset()
    return frozenset(stated if isinstance(stated, list) else [stated])


def check_weights(choice: Choice) -> tuple[WeightRecord, Mapping[str, StoredTensor] | None]:
    """What the model will ask for, and where the checkpoint has it (None for random weights). Reads headers only."""
    record = WeightRecord(choice.dtype)
    context = model_context(
        choice, record, ops=reference_ops(), attend=_before_binding, write_kv=_before_binding, device=torch.device("meta")
    )
    with inside(choice.family, "build the model"):
        choice.family.spec.build(context)
    if choice.checkpoint.random:
        return record, None
    stored = scan_checkpoint(choice.checkpoint.folder)
    tied = ("lm_head.weight",) if choice.checkpoint.config.get("tie_word_embeddings") else ()
    check(record, stored, (*choice.family.spec.ignored_weights, *tied), folder=choice.checkpoint.folder)
    return record, stored


def _before_binding(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a model ran while its weights were being recorded")


def plan(asked: EngineOptions, choice: Choice, *, weights_bytes: int, geometry: KVGeometry) -> MemoryPlan:
    """The memory plan of this choice."""
    backend_bytes = choice.attention.spec.capabilities.workspace_bytes
    return plan_memory(
        asked,
        choice.settings,
        choice.device_facts,
        weights=weights_bytes,
        workspace=workspace_bytes(choice.settings, choice.facts, backend_bytes=backend_bytes, itemsize=choice.dtype.itemsize),
        page_bytes=page_bytes(geometry),
    )


def fit_context(choice: Choice, memory: MemoryPlan) -> Choice:
    """A context longer than all KV pages together could never be filled: promise no more than they hold."""
    held = memory.num_pages * memory.page_size
    if held >= choice.settings.max_model_len:
        return choice
    decision = Decision(
        setting="max_model_len", value=str(held), reason="all that the KV pages hold; more memory or --num-pages raise it"
    )
    kept = tuple(made for made in choice.decisions if made.setting != decision.setting)
    settings = dataclasses.replace(choice.settings, max_model_len=held)
    return dataclasses.replace(choice, settings=settings, decisions=(*kept, decision))


def create_backend(choice: Choice, registry: Registry, pool: PagedKVPool) -> BackendRelay:
    """The chosen attention backend over the pool, registered and checked."""
    name = choice.attention.spec.name
    context = BackendContext(
        instance=f"{name}#0",
        geometry=pool.geometry,
        pool=pool,
        device=choice.device,
        dtype=choice.dtype,
        arena=DeviceArena(choice.device),
        options=registry.options_for(name),
    )
    return BackendRelay(registry.create_attn_backend(name, context), choice.attention.source)


def op_table(choice: Choice) -> OpTable:
    """The references, overridden by what the chosen plugins load, the highest priority last."""
    table = reference_ops()
    for offer in reversed(choice.ops):
        with inside(offer, f"load the operations {offer.name!r}"):
            table = dataclasses.replace(table, **offer.spec.load(choice.op_needs))
    return table


def model_context(
    choice: Choice, weights: WeightSource, *, ops: OpTable, attend: AttendFn, write_kv: WriteKVFn, device: torch.device
) -> ModelContext:
    """What the model is built from, for the recording build and for the real one."""
    return ModelContext(
        config=choice.checkpoint.config,
        facts=choice.facts,
        weights=weights,
        ops=ops,
        attend=attend,
        write_kv=write_kv,
        device=device,
        dtype=choice.dtype,
        max_positions=choice.settings.max_model_len,
        parallel=ParallelFacts(),
    )
