"""What a backend and a model see of the engine's memory, and the layers that keep a state in place of keys and values, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from enginery.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from enginery.contracts.attention import KVGeometry, LocalLayerId


@dataclass(frozen=True, kw_only=True)
class State:
    """One of the tensors that a layer keeps once for each request. dims: of one page. dtype: None is that of the paged memory."""

    name: str
    dims: tuple[int, ...]
    dtype: str | None = None


def check_heads(count: int, what: str, divisor: int, others: str) -> None:
    """Raises `CheckpointError` unless each of the others serves as many heads."""
    if count % divisor:
        heads = f"{count} {what}, which is no multiple of its {divisor} {others}"
        raise CheckpointError(f"a layer has {heads}, and each of these serves as many; correct config.json")


@dataclass(frozen=True, kw_only=True)
class RecurrentFacts:
    """A layer with states in place of keys and values: what a backend's `advance` computes, as data.

    rule: how the matrix moves on, S_t = exp(g_t) S_(t-1) + u_t k_t^T, with o_t = scale S_t q_t + skip v_t.
      linear  u_t = v_t: gated linear attention (arXiv:2312.06635), lightning attention (arXiv:2405.17381)
      delta   u_t = beta_t (v_t - exp(g_t) S_(t-1) k_t), with q and k divided by their length (arXiv:2412.06464, arXiv:2510.26692)
      scan    Mamba's (arXiv:2312.00752): each value head is a channel, value_dim 1, with dt_t v_t as its value, B_t as the key that
              all share and C_t as the query: `gates` are dt, after its softplus, then B, then C; g_t = -dt_t exp(a_log)
      conv    no matrix: the convolution is all there is; each value head is a channel, value_dim 1
    decay: what g_t is. constant: the layer's `log_decay`, one per head; head: -exp(a_log) softplus(gates + dt_bias), one per head
    and token; channel: one per key dim as well. gate_floor: g_t = gate_floor sigmoid(exp(a_log) (gates + dt_bias)) in its place.
    ssm: Mamba2's linear rule (arXiv:2405.21060): `mixed` is x, B, C, which are values, keys, queries, and dt_t, the softplus in
    the decay, multiplies what is written. step_limits: dt_t is no smaller, no larger.

    conv_kernel: tokens of a causal convolution of each channel of `mixed`, before everything else, two or more; 0 for none.
    conv_silu: a SiLU follows it. Key heads are repeated for the value heads: value head h has key head
    h // (value_heads // key_heads).
    """

    rule: Literal["delta", "linear", "scan", "conv"]
    decay: Literal["constant", "head", "channel"]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 0
    conv_silu: bool = True
    gate_floor: float | None = None
    ssm: bool = False
    step_limits: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        check_heads(self.value_heads, "value heads", self.key_heads, "key heads")
        if self.conv_kernel == 1:
            raise CheckpointError("a layer has a convolution of one token, which is not served; correct config.json")

    @property
    def mixed_widths(self) -> tuple[int, int, int]:
        """The columns of queries, keys and values in a token's row of `mixed`; of scan and conv layers all are values."""
        keys = self.key_heads * self.key_dim if self.rule in ("linear", "delta") else 0
        return keys, keys, self.value_heads * self.value_dim

    @property
    def mixed_width(self) -> int:
        """C: the values of a token's row of `mixed`: queries, keys and values one after the other, or values first, see `ssm`."""
        return sum(self.mixed_widths)

    @property
    def gates_width(self) -> int:
        """G: the values of a token's row of `gates`: of delta layers beta before its sigmoid, then those of the decay, per channel
        the other way round (b, a of GDN; g, b of KDA); see `rule` for a scan's.
        """
        if self.rule == "scan":
            return self.value_heads + 2 * self.key_dim
        decays = {"constant": 0, "head": self.value_heads, "channel": self.value_heads * self.key_dim}[self.decay]
        return 0 if self.rule == "conv" else decays + (self.value_heads if self.rule == "delta" else 0)

    @property
    def states(self) -> tuple[State, ...]:
        """What is kept: the convolution's last inputs, the oldest first, and the matrix."""
        conv = State(name="conv", dims=(self.conv_kernel - 1, self.mixed_width))
        matrix = State(name="matrix", dims=(self.value_heads, self.value_dim, self.key_dim), dtype="float32")
        return ((conv,) if self.conv_kernel > 1 else ()) + ((matrix,) if self.rule != "conv" else ())


@dataclass(frozen=True, kw_only=True, eq=False)
class RecurrentWeights:
    """What `advance` needs of a layer's weights, on the device. HV value heads, K key dim; None where its facts ask for none.

    conv: [C, conv_kernel], its last column for the token itself; conv_bias: [C]; both in the model's dtype. The rest is float32:
    a_log: [HV], of a scan [HV, K]; dt_bias: [HV], of a decay per channel [HV, K], None for zeros; skip: [HV], how much of its value
    a head adds to its output; log_decay: [HV], constant.
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

    def by_slot(self, layer: LocalLayerId) -> LayerKV:
        """The same without the pages: a row per slot."""

    def write(self, layer: LocalLayerId, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store this step's keys and values, [T, K, D] each, at `slots` [T] int64 (page * page_size + offset).

        An MLA layer keeps k alone, [T, 1, R + P].
        """


class StatePool(Protocol):
    """The states of one stage's recurrent layers."""

    def layer(self, layer: LocalLayerId) -> Mapping[str, torch.Tensor]:
        """The layer's states by name, see `RecurrentFacts.states`: [pages, *dims], device; each with as many pages.

        Which page a request's are read from and written to, its batch's `StateView` says.
        """


class WorkspaceArena(Protocol):
    """Scratch memory shared by everything that runs on one device."""

    def take(self, purpose: str, num_bytes: int, *, may_move: bool = False) -> torch.Tensor:
        """A uint8 buffer of at least `num_bytes` for `purpose`; the same memory for the same device, stream and purpose.

        Ask for the most first: a purpose that wants more later raises `Unsupported`, because what was planned with the smaller one
        would not share its memory. may_move: whoever has the smaller one keeps to it, and the larger one is new memory.
        """
