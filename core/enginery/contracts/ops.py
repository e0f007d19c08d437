"""The operations a model is made of, as a table of functions. The core has a torch reference for each; plugins offer faster ones.

T tokens, N rows or heads, H query heads, K KV heads, D head dim, R rotary dim, S slots, C columns, V vocabulary,
E experts, I an expert's inner size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

from enginery.contracts.versions import ApiVersion

if TYPE_CHECKING:
    import torch

    from enginery.contracts.attention import Reason
    from enginery.contracts.weights import ExpertsShape, Scheme, StoredWeight


HostCalls = list[tuple[Callable[..., object], tuple[object, ...]]]
"""Calls with their arguments, in order, that a step on a CPU is repeated by."""
RecordCalls = Callable[[HostCalls | None], None]


def only_torch(calls: HostCalls | None) -> None:
    """`record_calls` of what computes with torch's operators alone: these are seen, and there is nothing to tell."""


NormGate = Literal["silu", "sigmoid"]
LEAST_TEMPERATURE: Final = 1e-5  # dividing logits by less overflows, and the best token has all of the probability long before


class LinearFn(Protocol):
    """y = x W^T + b with W and b bound: [N, in] -> [N, out]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class NormingLinear(Protocol):
    """A `LinearFn` that takes few rows with the add and the norm before it, as one kernel."""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
        """`OpTable.add_rms_norm`, of what this product is called with next, and may have made then. None: nothing is done.

        `residual` gets other memory, with the sum (`Tensor.set_`): what was a view of it keeps what was there.
        """


@runtime_checkable
class GatableLinear(Protocol):
    """A `LinearFn` that may take the gate behind it too, of few rows as one kernel."""

    def with_gate(self, gated_silu: Callable[[torch.Tensor], torch.Tensor]) -> LinearFn:
        """[N, in] -> [N, out / 2], for outputs that are gates and then ups. gated_silu: the operation, for all other rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingTensors:
    """How each of N rows is sampled. table: [5, N] float32 on the logits' device, the properties' values one after the other.

    A temperature below `LEAST_TEMPERATURE` takes the largest logit, of equal ones the first. top_k: 0 for all. top_p
    (arXiv:1904.09751) and min_p (arXiv:2407.01082) are of what top_k left. uniform: by which a kept token is drawn; of
    `sample_rows`, where in [0, 1] of their mass, in the order of their indices, it is. most_kept: no row keeps more tokens, by its
    top_k. cut: whether a row drops any.
    """

    table: torch.Tensor
    most_kept: int
    cut: bool

    @property
    def temperature(self) -> torch.Tensor:
        """[N] float32; a row below `LEAST_TEMPERATURE` takes its largest logit."""
        return self.table[0]

    @property
    def top_k(self) -> torch.Tensor:
        """[N] float32, whole numbers; 0 keeps all."""
        return self.table[1]

    @property
    def top_p(self) -> torch.Tensor:
        """[N] float32, the share of probability that is kept."""
        return self.table[2]

    @property
    def min_p(self) -> torch.Tensor:
        """[N] float32, a share of the likeliest token's probability."""
        return self.table[3]

    @property
    def uniform(self) -> torch.Tensor:
        """[N] float32 in [0, 1]."""
        return self.table[4]


class QKNormRotaryWriteFn(Protocol):
    """Norms and rotates q and k, and writes k and v to their slots: `OpTable.qk_norm_rotary_write`."""

    def __call__(
        self,
        qkv: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor,
        *,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
    ) -> None: ...


class LatentNormRotaryWriteFn(Protocol):
    """Norms latents, rotates their last dims and those of q, and writes them: `OpTable.latent_norm_rotary_write`."""

    def __call__(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        cos_sin: torch.Tensor,
        *,
        stored: torch.Tensor,
        slots: torch.Tensor,
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens choose their experts: scores, groups, the best top_k, weights.

    scoring: of the router's logits over all experts. num_groups, top_groups: experts are chosen from the best groups alone; the
    score of a group is its best expert's (`max`, DeepSeek-V2) or the sum of its two best (`top2`, DeepSeek-V3). renormalise: the
    weights of a token sum to 1. scale multiplies them. num_shared: experts behind the others that every token has besides, with
    weight 1.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    renormalise: bool = False
    scale: float = 1.0
    num_shared: int = 0


class Routed(NamedTuple):
    """The experts of each token: ids [T, top_k + num_shared] int32, weights of the same shape, float32."""

    ids: torch.Tensor
    weights: torch.Tensor


class ExpertsFn(Protocol):
    """The sum of each token's experts, weighted: [T, C] -> [T, C]. An expert is down(activation(gate x, up x))."""

    def __call__(self, x: torch.Tensor, routed: Routed) -> torch.Tensor: ...


class BindExpertsFn(Protocol):
    """Binds the weights of experts: `OpTable.bind_experts`."""

    def __call__(
        self,
        gate_up: torch.Tensor | StoredWeight,
        down: torch.Tensor | StoredWeight,
        shape: ExpertsShape,
        biases: ExpertBiases | None = None,
    ) -> ExpertsFn: ...


class ExpertBiases(NamedTuple):
    """Of experts that have them: gate_up [E, 2I], down [E, C]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class OpTable:
    """One function per operation, chosen at start.

    embed(table [V, C], ids [T] int64): the rows of the table, [T, C].
    bind_linear(weight [out, in], bias [out] or None): may repack the weight; keeps what it needs of it. A weight that is stored in
    a format is a `StoredWeight`; a plugin is given those of its `OpSpec.schemes` alone.
    rms_norm(x [N, C], weight [C], eps): over the last dimension, in float32 inside.
    add_rms_norm(x [N, C], residual [N, C], weight, eps): adds x into residual in place, returns the norm of the sum.
    gated_rms_norm(x [T, H, D], gate [T, H, D], weight [D], eps, gating): rms_norm(x) times silu(gate) or sigmoid(gate), which is
    float32 inside; [T, H, D] of x's dtype. The gates' tokens may be any distance apart.
    gated_group_norm(x [T, G, D], gate [T, G, D], weight [G, D], eps, gating, gate_first), of 2.6: the same with a weight of each
    group; gate_first: the norm is of x times silu(gate) or sigmoid(gate), in float32 (Mamba2, arXiv:2405.21060).
    qk_norm_rotary(qk [T, N, D], weight [N, D] or None, eps, cos_sin [T, R]): in place; RMSNorm over each head if there is a weight,
    then rotates the first R dims, halves convention (GPT-NeoX).
    qk_norm_rotary_write(qkv [T, H + 2K, D], weight [H + K, D] or None, eps, cos_sin, keys, values [S, K, D], slots [T] int64): the
    same on the first H + K heads; then keys and values, which may be of another dtype, go to the rows of their slots.
    latent_norm_rotary_write(q [T, H, N + P], latents [T, R + P], weight [R], eps, cos_sin [T, P], stored [S, R + P], slots [T]):
    of MLA, in place: RMSNorm of each latent's first R dims, rotation of its last P and of those of each query head; then latents,
    which may be of another dtype there, go to the rows of their slots.
    gated_silu(x [N, 2C]): silu(first half) * second half.
    gated_gelu(x [N, 2C]), of 2.7: the same with the approximation of GELU by tanh, as Gemma has it.
    gated_sigmoid(x [N, C], gate [N, C]): x * sigmoid(gate); the gates' rows may be any distance apart.
    route(logits [T, E], bias [E] float32 or None, routing): the experts of each token, scored in float32. The bias counts in the
    choice of groups and experts, not in the weights (DeepSeek-V3). Logits of a shorter type are widened before a plugin has them,
    unless it states `OpSpec.narrow_logits`.
    route_gated(made [T, E + 1], bias, routing): the same where a product makes the logits and, behind them, the gate of the shared
    experts, whose weight is its sigmoid. Of any float type.
    bind_router(weight [E, C]): the product with logits in float32, added up in float32, of rows of any float type.
    bind_experts(gate_up [E, 2I, C], down [E, C, I], shape, biases): gates before ups; may repack; keeps what it needs. Of `shape`
    the activation matters; sizes are those of the tensors, which may be a rank's part.
    bind_squared_experts(up [E, I, C], down [E, C, I]), of 2.6: experts without a gate, down(relu(up x)^2), as Nemotron-H has them.
    greedy(logits [N, V]): the index of each row's largest, of equal ones the first: [N] int64. Runs inside of graphs.
    sample_rows(logits [N, V], draws): a token for each row, [N] int64, see `SamplingTensors`. Nothing asks for it since 2.5.
    draw_rows(logits [N, V], draws): the same by noise, of 2.5: the kept token whose logit / temperature - log(E) is largest, of
    equal ones the first, [N] int64. E of `enginery.nn.reference_ops.exponentials` follows from the row's number and the token's
    index alone, so that rows of one number and nearly the same logits mostly have the same token, whatever the vocabulary's order
    (arXiv:2408.07978). An infinite logit, or NaN, is largest; a row of nothing but -infinity has some token.
    """

    embed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    bind_linear: Callable[[torch.Tensor | StoredWeight, torch.Tensor | None], LinearFn]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    gated_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, NormGate], torch.Tensor]
    gated_group_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, NormGate, bool], torch.Tensor]
    qk_norm_rotary: Callable[[torch.Tensor, torch.Tensor | None, float, torch.Tensor], None]
    qk_norm_rotary_write: QKNormRotaryWriteFn
    latent_norm_rotary_write: LatentNormRotaryWriteFn
    gated_silu: Callable[[torch.Tensor], torch.Tensor]
    gated_gelu: Callable[[torch.Tensor], torch.Tensor]
    gated_sigmoid: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    route: Callable[[torch.Tensor, torch.Tensor | None, Routing], Routed]
    route_gated: Callable[[torch.Tensor, torch.Tensor | None, Routing], Routed]
    bind_router: Callable[[torch.Tensor], LinearFn]
    bind_experts: BindExpertsFn
    bind_squared_experts: Callable[[torch.Tensor, torch.Tensor], ExpertsFn]
    greedy: Callable[[torch.Tensor], torch.Tensor]
    sample_rows: Callable[[torch.Tensor, SamplingTensors], torch.Tensor]
    draw_rows: Callable[[torch.Tensor, SamplingTensors], torch.Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class PeerMemory:
    """Memory on the devices of the R tensor ranks of a lane, of each rank as much, which kernels of all of them read and write.

    rank: this one, of R. parts: [bytes] uint8 of each rank, by rank, zeros at the start; kernels of this rank's device reach all.
    owner: has to live as long as they are used.
    """

    rank: int
    parts: tuple[torch.Tensor, ...]
    owner: object = None


class PeerOps(Protocol):
    """What kernels of R ranks do together: each writes to the memory of all. All ranks call it in the same order.

    They run inside of graphs. What is taken follows from sizes and types alone, so that it is the same on all ranks.
    """

    def takes_sum(self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether `add_rms_norm` is to be called for these: it can, and is faster than a sum and a norm."""

    def add_rms_norm(self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`OpTable.add_rms_norm` of the sum of all ranks' partial [N, C]: the same bits on all of them."""

    def takes_best(self, columns: torch.Tensor) -> bool:
        """Whether `best` is to be called for these."""

    def best(self, columns: torch.Tensor, first: int) -> torch.Tensor:
        """Each rank's [N, V / R] of the logits -> [N] int64 on all ranks: the largest's index, of equal ones the lowest.

        first: index of this rank's first column; it may have none, [N, 0]. -1 where the largest is NaN, which counts as infinite.
        """

    def end(self) -> None:
        """Have kernels end that wait for other ranks, whatever they give then. Called from another thread; nothing follows it."""


@runtime_checkable
class EarlySums(Protocol):
    """`PeerOps` that send rows on to other ranks while more of them are computed."""

    def summed_early(self, product: LinearFn, columns: int) -> LinearFn:
        """A product [N, columns] of partial sums that does so: see `Collectives.summed_early`."""


@dataclass(frozen=True, kw_only=True)
class PeerOpsSpec:
    """`PeerOps` on offer. num_bytes: of each rank's memory; more_of_two: and where there are two. bind: imports what is heavy."""

    num_bytes: int
    bind: Callable[[PeerMemory], PeerOps]
    more_of_two: int = 0

    def bytes_of_each(self, num_ranks: int) -> int:
        """The memory of each of so many ranks of a stage."""
        return self.num_bytes + (self.more_of_two if num_ranks == 2 else 0)


@dataclass(frozen=True, kw_only=True)
class OpNeeds:
    """Where the operations will run. dtype: of weights and activations."""

    device: str
    dtype: str
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """A set of faster operations on offer: any subset of `OpTable`'s fields.

    load: imports what is heavy and returns the functions by field name. schemes: by `bind_linear` and `bind_experts`, how stored
    weights may come; without an entry they come as plain numbers. record_calls: on CPUs; given a list, has each call that torch's
    operators do not make appended to it as (function, arguments), of this thread, until it is given None; `only_torch` where there
    are none; None: steps with its operations are not recorded. narrow_logits: `route` takes logits of the model's type and widens
    them itself. peer_ops: for ranks on GPUs that reach each other's memory; None: NCCL. Rules: docs/write-an-op.md.
    """

    name: str
    api: ApiVersion
    priority: int
    provides: tuple[str, ...]
    refuse: Callable[[OpNeeds], list[Reason]]
    load: Callable[[OpNeeds], Mapping[str, Callable[..., Any]]]
    schemes: Mapping[str, frozenset[Scheme]] = field(default_factory=dict)
    record_calls: RecordCalls | None = None
    narrow_logits: bool = False
    peer_ops: PeerOpsSpec | None = None
