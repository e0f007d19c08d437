"""The attention contract: what a backend can do, what is asked of it, and what it is built from.

H query heads, K KV heads, D head dim, T tokens, B requests, R latent rank, N, P: head dims without and with rotary position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from enginery.contracts.batch import FULL, STATE, WINDOW, MemoryKind, Phase
from enginery.contracts.memory import RecurrentFacts, RecurrentWeights, check_heads
from enginery.contracts.parallel import ParallelFacts
from enginery.contracts.versions import ApiVersion

if TYPE_CHECKING:
    import torch

    from enginery.contracts.batch import ForwardBatch
    from enginery.contracts.memory import KVPool, StatePool, WorkspaceArena
    from enginery.contracts.ops import RecordCalls
    from enginery.contracts.plan import ForwardPlan


class GlobalLayerId(int):
    """A layer that has memory, counted over the whole model: its place in `ModelFacts.layers`."""

    __slots__ = ()


class LocalLayerId(int):
    """A layer that has memory, counted over one pipeline stage. Pools are indexed by it alone."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why something was refused. `rule` is a stable word for machines, `text` a sentence for people."""

    rule: str
    text: str


@dataclass(frozen=True, kw_only=True)
class LatentFacts:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): memory has one row of R + P values per token, for all heads.

    rank: `kv_lora_rank`, R. rope_dim: `qk_rope_head_dim`, P. nope_dim: `qk_nope_head_dim`, N. value_dim: `v_head_dim`.
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    def activation_width(self, num_heads: int, q_rank: int | None) -> int:
        """Values of one token that attention has at once: queries before and after they are absorbed, the row, and outputs.

        q_rank: of the queries' own latents, None for queries of full rank.
        """
        row = self.rank + self.rope_dim
        queries = num_heads * (self.nope_dim + self.rope_dim) + 2 * (q_rank or 0)
        return queries + row + num_heads * (2 * self.rank + row + self.value_dim)


@dataclass(frozen=True, kw_only=True)
class AttnLayerFacts:
    """One layer that has memory, as its model's configuration states it: attention, or a recurrence.

    sliding_window: a token sees itself and the window - 1 before it. softcap: s -> c tanh(s / c) before the mask. sinks: whether
    `LayerSpec.sinks` are there. latent: of an MLA layer, which a backend sees as one KV head of R + P dims, whose first R are the
    value too. recurrent: of a layer with a state in place of keys and values, whose heads and head dim are those of its keys.
    v_head_dim: of layers whose values are narrower or wider than their keys; 0: of index keys, which sparse attention reads beside
    those of another layer. decoder_layer: the decoder layer that it is in; layers that differ in nothing else are equal.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: LatentFacts | None = None
    recurrent: RecurrentFacts | None = None
    v_head_dim: int | None = None
    decoder_layer: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        check_heads(self.num_heads, "query heads", self.num_kv_heads, "KV heads")

    @property
    def value_dim(self) -> int:
        """Dims of a head's value, as the backend sees it."""
        if self.recurrent is not None:
            return self.recurrent.value_dim
        if self.latent is not None:
            return self.latent.rank
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def kind(self) -> MemoryKind:
        """The kind of memory that the layer keeps what it needs in."""
        if self.recurrent is not None:
            return STATE
        return FULL if self.sliding_window is None else WINDOW


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentWeights:
    """`kv_b_proj` of an MLA layer, [H, N + value_dim, R]: from a latent to each head's key without position, and value."""

    kv_b: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSpec:
    """The static facts of one attention layer, given to its socket when the model is built.

    global_id counts over the whole model, local_id over the layers of this pipeline stage; pools are indexed by local_id only.
    scale multiplies q . k. sinks: [H] float32, one more logit per head in the softmax's denominator. latent: for MLA layers.
    recurrent: for those with a state.
    """

    global_id: GlobalLayerId
    local_id: LocalLayerId
    facts: AttnLayerFacts
    scale: float
    sinks: torch.Tensor | None = None
    latent: LatentWeights | None = None
    recurrent: RecurrentWeights | None = None

    @property
    def kind(self) -> MemoryKind:
        """The kind of memory that the layer keeps what it needs in: where `ForwardBatch.views` has its view."""
        return self.facts.kind


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an attention backend can do, as data. A set that is None allows everything.

    min_compute_capability, max_compute_capability: of CUDA devices, inclusive. causal: softmax attention. recurrences: the (rule,
    decay) of recurrent layers that `advance` takes; empty: none. mla: paged attention over latents. latent_dims: the (rank,
    rope_dim) it takes. mla_ragged: MLA prefills over keys and values it is given (`init_mha_chunk_metadata`). lse_base: of the log-
    sum-exp it can return, None for none. unequal_values: layers whose values are not as wide as their keys. device_lengths:
    decoding batches whose lengths the device alone knows (`ForwardBatch.kv_lens`, `draft_steps_plan`). verify_lengths: those that
    verify too. trees: drafts that branch (`ForwardBatch.trees`, `verify_mask`), in layers without windows. prompt_checkpoints: amid
    prompts (`StateView`). needs_jit: compiles on first use. workspace_bytes: of the arena.
    """

    devices: frozenset[str]
    dtypes: frozenset[str]
    kv_dtypes: frozenset[str]
    phases: frozenset[Phase] = frozenset({Phase.PREFILL, Phase.DECODE, Phase.MIXED})
    head_dims: frozenset[int] | None = None
    page_sizes: frozenset[int] | None = None
    min_compute_capability: tuple[int, int] | None = None
    max_compute_capability: tuple[int, int] | None = None
    causal: bool = True
    sliding_window: bool = False
    softcap: bool = False
    sinks: bool = False
    mla: bool = False
    mla_ragged: bool = False
    latent_dims: frozenset[tuple[int, int]] | None = None
    sparse: bool = False
    recurrences: frozenset[tuple[str, str]] = frozenset()
    graphs: bool = False
    batch_invariant: bool = False
    lse_base: Literal["e", "2"] | None = None
    unequal_values: bool = False
    device_lengths: bool = False
    verify_lengths: bool = False
    trees: bool = False
    prompt_checkpoints: bool = False
    needs_jit: bool = False
    workspace_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class AttnNeeds:
    """What model, device and settings ask of an attention backend. layers: that it will run. single: steps of one request alone."""

    device: str
    dtype: str
    kv_dtype: str
    page_size: int
    layers: tuple[AttnLayerFacts, ...]
    phases: frozenset[Phase] = frozenset({Phase.PREFILL, Phase.DECODE, Phase.MIXED})
    compute_capability: tuple[int, int] | None = None
    sparse: bool = False
    mla_ragged: bool = False
    lse: bool = False
    batch_invariant: bool = False
    device_lengths: bool = False
    trees: bool = False
    single: bool = False


@dataclass(frozen=True, kw_only=True)
class KVGeometry:
    """The shape of the memory of one stage's attention layers, indexed by `LocalLayerId`. pages: how many there are of each kind.

    Paged: [num_pages + 1, page_size, K, D], keys and values; MLA layers: [num_pages + 1, page_size, 1, R + P]. Each state of
    a recurrent layer: [state pages + 2, *dims]. The page after the last of each kind belongs to nobody, padding writes there;
    nor does the seat after the last one, `num_seats`. The state page after that is zero for ever. dtype: of keys and values.
    state_dtype: of states that name none; empty: the same.
    """

    pages: Mapping[MemoryKind, int]
    page_size: int
    layers: tuple[AttnLayerFacts, ...]
    dtype: str
    num_seats: int = 0
    state_dtype: str = ""

    @property
    def num_pages(self) -> int:
        """Pages of the kind `full`."""
        return self.pages.get(FULL, 0)

    def scratch_page(self, kind: MemoryKind) -> int:
        """The page of that kind which belongs to nobody. Layers with a window are in full pages where there are no others."""
        return self.pages.get(kind, self.num_pages if kind == WINDOW else 0)

    def kind_of(self, layer: AttnLayerFacts) -> MemoryKind:
        """The kind of memory that the layer is in here."""
        return FULL if layer.kind == WINDOW and WINDOW not in self.pages else layer.kind

    @property
    def zero_page(self) -> int:
        """The state that is zero for ever: beginning requests read it."""
        return self.scratch_page(STATE) + 1


class SparseCoordinator(Protocol):
    """Decides which of a sparse model's keys and values are on the device. What else it offers is between it and its backends."""

    coordinator_id: str


@dataclass(frozen=True, kw_only=True, eq=False)
class CoordinatorContext:
    """All that a sparse coordinator is built from; the pools are there, backends are not yet."""

    instance: str
    geometry: KVGeometry
    pool: KVPool
    device: torch.device
    parallel: ParallelFacts = field(default_factory=ParallelFacts)
    options: object | None = None


@dataclass(frozen=True, kw_only=True)
class SparseCoordinatorSpec:
    """A sparse-KV coordinator on offer; built by `create_sparse_coordinator`."""

    name: str
    api: ApiVersion
    summary: str
    options: type[Any] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class BackendContext:
    """All that a backend is built from. coordinator None means that sparse KV is configured off, never "not yet"."""

    instance: str
    geometry: KVGeometry
    pool: KVPool
    states: StatePool
    device: torch.device
    dtype: torch.dtype
    arena: WorkspaceArena
    parallel: ParallelFacts = field(default_factory=ParallelFacts)
    coordinator: SparseCoordinator | None = None
    options: object | None = None


class AttnBackend(Protocol):
    """A live backend. `backend_id` is `context.instance`, the name its plans carry. It has `attend`, `advance` or both.

    What it has besides is an optional protocol or hook: no member is ever added here.
    """

    backend_id: str

    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ForwardPlan:
        """Plan one padded batch from its host tensors alone. capture: the plan will be captured in a graph."""


class KernelStore(Protocol):
    """Kernels that take minutes to compile and are then kept on disk. No device is needed to compile them.

    The engine asks `missing` when it starts. While something is, it may begin with another backend, has `compile` called in a
    process of its own, and changes over between two steps. options: what `-o` set, of the spec's options class.
    """

    def missing(self, needs: AttnNeeds, options: object | None) -> Sequence[str]:
        """What has to be compiled before a backend for `needs` can be built, by name. Empty: it can be built at once."""

    def compile(self, needs: AttnNeeds, options: object | None) -> None:
        """Compile all that is missing. Raises `Unsupported` with the compiler's words."""


@dataclass(frozen=True, kw_only=True)
class AttnBackendSpec:
    """An attention backend on offer.

    priority: `auto` takes the highest that refuses nothing. prefill_priority: the same where it would only prefill, beside another
    that decodes; single_priority: where it would only decode, steps of one request, beside another that decodes more; None for
    priority. refuse_also: reasons that capabilities cannot express; pure, needs no device. options: a dataclass whose fields
    `-o NAME.field=value` sets. kernel_store: of kernels that take minutes to compile. record_calls: as `OpSpec` has it.
    """

    name: str
    api: ApiVersion
    priority: int
    capabilities: Capabilities
    summary: str
    prefill_priority: int | None = None
    single_priority: int | None = None
    refuse_also: Callable[[AttnNeeds], list[Reason]] = lambda _: []
    options: type[Any] | None = None
    kernel_store: KernelStore | None = None
    record_calls: RecordCalls | None = None

    def priority_for(self, needs: AttnNeeds) -> int:
        """Its rank among those that could serve `needs`."""
        apart = self.single_priority if needs.single else self.prefill_priority if needs.phases == {Phase.PREFILL} else None
        return self.priority if apart is None else apart

    def refuse(self, needs: AttnNeeds) -> list[Reason]:
        """Every reason why this backend cannot serve `needs`; empty if it can."""
        if not isinstance(also := self.refuse_also(needs), list):
            raise TypeError(f"refuse_also must return a list of Reason objects, not {also!r:.100}")
        return capability_refusals(self.capabilities, needs) + also


def capability_refusals(can: Capabilities, needs: AttnNeeds) -> list[Reason]:
    """What `needs` asks for and `can` does not offer."""
    reasons: list[Reason] = []

    def member(rule: str, value: object, allowed: Collection[object] | None) -> None:
        if allowed is not None and value not in allowed:
            names = ", ".join(sorted(str(item) for item in allowed))
            reasons.append(Reason(rule=rule, text=f"{rule} {value} is not among {names}" if names else f"no {rule} is offered"))

    member("device", needs.device, can.devices)
    member("dtype", needs.dtype, can.dtypes)
    member("kv dtype", needs.kv_dtype, can.kv_dtypes)
    member("page size", needs.page_size, can.page_sizes)
    for phase in sorted(needs.phases):
        member("phase", phase, can.phases)
    allowed = {"head dim": can.head_dims, "latent rank and rope dim": can.latent_dims, "recurrence": can.recurrences}
    for rule, value in sorted({_shape_of(layer) for layer in needs.layers}, key=str):
        member(rule, value, allowed[rule])
    missing = [rule for rule, (asked, offered) in _asked_and_offered(can, needs).items() if asked and not offered]
    features = [Reason(rule=rule, text=f"{rule} is needed and not offered") for rule in missing]
    return [*dict.fromkeys(reasons), *_compute_capability_refusals(can, needs), *features]


def _shape_of(layer: AttnLayerFacts) -> tuple[str, object]:
    if layer.recurrent is not None:
        return "recurrence", (layer.recurrent.rule, layer.recurrent.decay)
    if layer.latent is not None:
        return "latent rank and rope dim", (layer.latent.rank, layer.latent.rope_dim)
    return "head dim", layer.head_dim


def _asked_and_offered(can: Capabilities, needs: AttnNeeds) -> dict[str, tuple[bool, bool]]:
    layers = needs.layers
    unequal = {of.value_dim for of in layers if of.latent is None and of.recurrent is None and of.value_dim != of.head_dim}
    return {
        "softmax attention": (any(layer.recurrent is None for layer in layers), can.causal),
        "sliding window": (any(layer.sliding_window is not None for layer in layers), can.sliding_window),
        "soft cap": (any(layer.softcap is not None for layer in layers), can.softcap),
        "attention sinks": (any(layer.sinks for layer in layers), can.sinks),
        "values of another width than keys": (bool(unequal - {0}), can.unequal_values),
        "MLA": (any(layer.latent is not None for layer in layers), can.mla),
        "ragged MLA prefill": (needs.mla_ragged, can.mla_ragged),
        "a log-sum-exp": (needs.lse, can.lse_base is not None),
        "sparse attention": (any((needs.sparse, 0 in unequal)), can.sparse),
        "batch invariance": (needs.batch_invariant, can.batch_invariant),
        "lengths that the device alone knows": (needs.device_lengths, can.device_lengths),
        "trees of drafts": (needs.trees, can.trees),
    }


def _compute_capability_refusals(can: Capabilities, needs: AttnNeeds) -> list[Reason]:
    rule, has, low, high = "compute capability", needs.compute_capability, can.min_compute_capability, can.max_compute_capability
    unknown = "that of the device is not known" if needs.device == "cuda" else "the device is no CUDA device"
    if low is not None and (has is None or has < low):
        why = unknown if has is None else f"the device has {has[0]}.{has[1]}"
        return [Reason(rule=rule, text=f"needs compute capability {low[0]}.{low[1]} or more, {why}")]
    if has is not None and high is not None and has > high:
        return [Reason(rule=rule, text=f"needs compute capability {high[0]}.{high[1]} or less, the device has {has[0]}.{has[1]}")]
    return []
