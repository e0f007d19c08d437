"""What a backend and a model see of the engine's memory, and the layers that keep a state in place of keys and values, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from enginery.contracts.attention import KVGeometry, LocalLayerId


@dataclass(frozen=True, kw_only=True)
class RecurrentFacts:
    """A layer with a state in place of keys and values: what a backend's `advance` computes, as data.

    rule: how a state moves, S_t = exp(g_t) S_(t-1) + .., o_t = scale S_t q_t. "linear": + v_t k_t^T (gated linear attention,
    arXiv:2312.06635); "delta": the delta rule (arXiv:2412.06464); "scan": Mamba's; "conv": a convolution, without a state matrix.
    decay: what g_t is. "constant": the layer's `log_decay`, one per head; "head": -exp(a_log) softplus(gates + dt_bias), one per
    head and token; "channel": one per key dim as well. gate_floor: g_t is no smaller.

    A state is [value_heads, value_dim, key_dim], float32, for each request; key heads are repeated for the value heads.
    conv_kernel: tokens of a causal convolution over `mixed`, before everything else; 0 for none.
    """

    rule: Literal["delta", "linear", "scan", "conv"]
    decay: Literal["constant", "head", "channel"]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 0
    gate_floor: float | None = None

    @property
    def mixed_width(self) -> int:
        """C: the values of a token's row of `mixed`, queries, keys and values one after the other."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, kw_only=True, eq=False)
class RecurrentWeights:
    """What `advance` needs of a layer's weights. HV value heads; None where the layer's facts ask for none.

    conv: [C, conv_kernel], conv_bias: [C]; a_log, dt_bias: [HV] float32, of the decay; skip: [HV], how much of its input a head
    adds to its output; log_decay: [HV] float32, constant.
    """

    conv: torch.Tensor | None = None
    conv_bias: torch.Tensor | None = None
    a_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    skip: torch.Tensor | None = None
    log_decay: torch.Tensor | None = None


class LayerKV(NamedTuple):
    """One layer's paged keys and values: [num_pages + 1, page_size, K, D] each, device; `by_slot`, [slots, K, D]. Views, no copies.

    Of an MLA layer, k are the latents, one row of R + P dims per token in place of K and D, and v their first R dims.
    """

    k: torch.Tensor
    v: torch.Tensor


class KVPool(Protocol):
    """The paged KV memory of one stage."""

    geometry: KVGeometry

    def layer(self, layer: LocalLayerId) -> LayerKV:
        """The pages of one layer of this stage."""
        ...

    def by_slot(self, layer: LocalLayerId) -> LayerKV:
        """The same without the pages: a row per slot."""
        ...

    def write(self, layer: LocalLayerId, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store this step's keys and values, [T, K, D] each, at `slots` [T] int64 (page * page_size + offset).

        An MLA layer keeps k alone, [T, 1, R + P].
        """
        ...


class StatePool(Protocol):
    """The states of one stage's recurrent layers."""

    def layer(self, layer: LocalLayerId) -> torch.Tensor:
        """[state pages + 2, HV, value_dim, key_dim] float32, device; where a request's is, its batch's `StateView` says."""
        ...


class WorkspaceArena(Protocol):
    """Scratch memory shared by everything that runs on one device."""

    def take(self, purpose: str, num_bytes: int, *, may_move: bool = False) -> torch.Tensor:
        """A uint8 buffer of at least `num_bytes` for `purpose`; the same memory for the same device, stream and purpose.

        Ask for the most first: a purpose that wants more later raises `Unsupported`, because what was planned with the smaller one
        would not share its memory. may_move: whoever has the smaller one keeps to it, and the larger one is new memory.
        """
        ...
