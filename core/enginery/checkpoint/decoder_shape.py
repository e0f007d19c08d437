"""The shape of a decoder as config.json states it, in the hub's spelling and in that of transformers 5.

Shared by the model plugins whose families differ in a few flags (Llama, Mixtral, Qwen, GLM, DeepSeek). Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from enginery.contracts.attention import AttnLayerFacts, LatentFacts
from enginery.contracts.model import ModelFacts
from enginery.contracts.ops import Routing
from enginery.contracts.parallel import Channel
from enginery.contracts.weights import SILU, Activation, ExpertNames
from enginery.errors import CheckpointError

WINDOWED: Final = "sliding_attention"
EVERYTHING: Final = "full_attention"
SILU_ONLY: Final[Mapping[str, Activation]] = {"silu": SILU, "swish": SILU}  # of two names, as in transformers


@dataclass(frozen=True, kw_only=True)
class RopeShape:
    """Rotary embedding parameters. `parameters` are the keys of the scaling method, as in config.json.

    max_positions: `max_position_embeddings`, which some methods scale from.
    """

    kind: str
    theta: float
    rotary_dim: int
    max_positions: int
    parameters: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class NormNames:
    """What a layer's norms are called. attention_out, mlp_out: of what attention and MLP return, before it is added; None: none."""

    attention: str = "input_layernorm"
    mlp: str = "post_attention_layernorm"
    attention_out: str | None = None
    mlp_out: str | None = None


@dataclass(frozen=True, kw_only=True)
class MixtureShape:
    """A mixture of experts, each a gated MLP, in some layers; the others keep the dense MLP.

    layers: which have it. inner_size: of each expert. shared_size: inner size of the expert that every token has, 0 for none;
    shared_gate: it is weighted by a sigmoid. correction_bias: the router has one. wide_router: its product is computed in float32,
    else in the model's dtype. router_bias: it has one, before scores. expert_bias: each projection of an expert has one. order,
    turned: see `ExpertsShape`. Raises `CheckpointError` for a routing that cannot be.
    """

    layers: frozenset[int]
    num_experts: int
    inner_size: int
    routing: Routing
    shared_size: int = 0
    shared_gate: bool = False
    correction_bias: bool = False
    wide_router: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    order: Literal["halves", "interleaved"] = "halves"
    turned: bool = False
    activation: Activation = SILU
    names: ExpertNames = field(default_factory=ExpertNames)

    def __post_init__(self) -> None:
        routing, count = self.routing, self.num_experts
        groups, least = routing.num_groups, 2 if routing.group_score == "top2" else 1
        if count % groups or count // groups < least or not 1 <= routing.top_groups <= groups:
            raise CheckpointError(
                f"config.json has {count} experts in {groups} groups, of which {routing.top_groups} are chosen; groups must be "
                f"equal, of at least {least} experts, and no fewer than are chosen"
            )
        if not 1 <= routing.top_k <= routing.top_groups * (count // groups):
            raise CheckpointError(
                f"config.json has {routing.top_k} experts per token of {count} in {groups} groups, of which {routing.top_groups} "
                "are chosen; a token needs at least one expert and no more than its groups have"
            )

    def width(self, hidden_size: int) -> int:
        """Values alive per token: each expert's inner values and output, the shared expert's, and float32 scores and their kin."""
        return self.routing.top_k * (3 * self.inner_size + hidden_size) + 3 * self.shared_size + hidden_size + 8 * self.num_experts


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Pre-norm decoder: RMSNorm, rotary GQA, gated MLP or experts. One sliding window (or None) per layer.

    norm_offset: added to the weight of every norm (Gemma stores w of 1 + w). embedding_scale: of what the embedding gives.
    attention_scale: of q . k; None for 1 / sqrt(head_dim). softcap, logit_cap: c of c tanh(s / c), of scores and of logits.
    window_rope: of layers with a window, where it is not `rope`. rotates_neighbours: attention rotates pairs (2i, 2i + 1).
    packed_mlp: gate and up are stored in one piece, `gate_up_proj`. sinks: layers whose attention has them, in `sinks`.
    v_head_dim: of values that are not as wide as keys. window_kv_heads: of layers with a window, where they have others.
    stem: of the names of all but the head. embedding: its name.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    tied: bool
    max_positions: int
    windows: tuple[int | None, ...]
    rope: RopeShape
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: MixtureShape | None = None
    activation: Activation = SILU
    norms: NormNames = NormNames()
    norm_offset: float = 0.0
    embedding_scale: float | None = None
    attention_scale: float | None = None
    softcap: float | None = None
    logit_cap: float | None = None
    window_rope: RopeShape | None = None
    rotates_neighbours: bool = False
    packed_mlp: bool = False
    sinks: frozenset[int] = frozenset()
    v_head_dim: int | None = None
    window_kv_heads: int | None = None
    stem: str = "model"
    embedding: str = "embed_tokens"

    @property
    def mlp_width(self) -> int:
        """Values that the larger of MLP and experts keeps alive per token."""
        dense = 3 * self.intermediate_size
        return dense if self.experts is None else max(dense, self.experts.width(self.hidden_size))

    def one_more(self, count: int = 1) -> DecoderShape:
        """Of a single layer like the last one, or of several: what modules for multi-token prediction have."""
        experts, last = self.experts, len(self.windows) - 1
        if experts is not None:
            experts = replace(experts, layers=frozenset(range(count) if last in experts.layers else ()))
        return replace(self, windows=self.windows[-1:] * count, experts=experts)

    def facts(self, layers: tuple[AttnLayerFacts, ...] = (), *, width: int = 0) -> ModelFacts:
        """The part that the core needs. layers: those with memory, where they are not this grouped-query attention.

        width: values that the widest of them keeps alive per token.
        """
        if not layers:
            layers = tuple(map(self._layer, range(len(self.windows))))
            heads = self.num_heads + 2 * max(self.num_kv_heads, self.window_kv_heads or 0)
            width = 2 * heads * max(self.head_dim, self.v_head_dim or 0)
        return ModelFacts(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_positions=self.max_positions,
            activation_width=3 * self.hidden_size + max(width, self.mlp_width),
            layers=layers,
            boundary=self.boundary,
        )

    def _layer(self, index: int) -> AttnLayerFacts:
        window = self.windows[index]
        return AttnLayerFacts(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads if window is None else self.window_kv_heads or self.num_kv_heads,
            head_dim=self.head_dim,
            sliding_window=window,
            softcap=self.softcap,
            sinks=index in self.sinks,
            v_head_dim=self.v_head_dim,
            decoder_layer=index,
        )

    @property
    def boundary(self) -> tuple[Channel, ...]:
        """What crosses from one pipeline stage to the next: the last layer's output, and the residual stream without it."""
        return Channel(name="delta", width=self.hidden_size), Channel(name="residual", width=self.hidden_size)


def required(config: Mapping[str, object], key: str, *, null: str | None = None) -> Any:
    """`config[key]`, or a `CheckpointError` that names the key. null: what null means, where it may be the value."""
    if key not in config or (config[key] is None and null is None):
        wanted = "; the file is incomplete" if null is None else f": a number, or null for {null}"
        raise CheckpointError(f"config.json has no {key!r}, which this architecture needs{wanted}")
    return config[key]


def whole_number(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    """`config[key]`, of 1 or more; `default`, if one is given, for null and 0 too. Raises `CheckpointError` that names the key."""
    value = config.get(key)
    if not value and default is not None:
        return default
    if isinstance(value := required(config, key), bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json has {key} {value!r}, which must be a whole number of 1 or more; the file is damaged")
    return value


def _real(values: Mapping[str, object], key: str, default: float) -> float:
    """`values[key]`; `default` for none, null and 0."""
    value = values.get(key) or default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"config.json has {key} {value!r}, which must be a number above 0; the file is damaged")
    return float(value)


def read_rope(config: Mapping[str, object], head_dim: int) -> RopeShape:
    """`rope_theta` and `rope_scaling` (hub files), or `rope_parameters` (transformers 5), to which the second may be added."""
    added, written = (config.get(key) or {} for key in ("rope_scaling", "rope_parameters"))
    if not isinstance(added, Mapping) or not isinstance(written, Mapping):
        raise CheckpointError(f"config.json has rope_scaling {added!r} and rope_parameters {written!r}, which must be an object")
    parameters, outside = dict(added or written), {**config, **written}
    kind = parameters.pop("rope_type", None) or parameters.get("type") or "default"
    theta = _real(parameters, "rope_theta", _real(outside, "rope_theta", 10000.0))
    partial = _real(parameters, "partial_rotary_factor", _real(outside, "partial_rotary_factor", 1.0))
    for key in ("type", "rope_theta", "partial_rotary_factor"):
        parameters.pop(key, None)
    if config.get("original_max_position_embeddings") is not None:  # Phi-style files state it outside, and it wins there
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    rotary_dim, positions = int(head_dim * partial), whole_number(config, "max_position_embeddings")
    return RopeShape(kind=kind, theta=theta, rotary_dim=rotary_dim, max_positions=positions, parameters=parameters)


def rotating_whole_heads(shape: DecoderShape) -> DecoderShape:
    """The shape. Raises `CheckpointError` if config.json has a part of each head rotated, where transformers rotates all of it."""
    if shape.rope.rotary_dim != shape.head_dim:
        raise CheckpointError(
            f"config.json has a partial_rotary_factor, for {shape.rope.rotary_dim} of {shape.head_dim} dims of a head; this "
            "architecture rotates all of them, so the two contradict each other: take it out, or correct 'architectures'"
        )
    return shape


def read_decoder_shape(
    config: Mapping[str, object],
    windows: tuple[int | None, ...] | None = None,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    experts: MixtureShape | None = None,
    activations: Mapping[str, Activation] = SILU_ONLY,
) -> DecoderShape:
    """Read what decoders have in common; the flags are what a family fixes. activations: by what `hidden_act` may be.

    What else a family changes, as norms behind attention, it puts in with `dataclasses.replace`. Raises `CheckpointError`.
    """
    activation = str(config.get("hidden_act", "silu"))
    check_served({"hidden_act": activation}, "hidden_act", activations)
    check_served(config, "is_causal", (True,))  # false: in both directions, as of gte-Qwen2
    num_heads = whole_number(config, "num_attention_heads")
    hidden_size = whole_number(config, "hidden_size")
    num_kv_heads = whole_number(config, "num_key_value_heads", num_heads)
    head_dim = whole_number(config, "head_dim", hidden_size // num_heads)
    if head_dim < 1:
        raise CheckpointError(f"config.json has {hidden_size=} and {num_heads=}, which leave a head no dims; the file is damaged")
    num_layers, rope = whole_number(config, "num_hidden_layers"), read_rope(config, head_dim)
    yarn = [_real(rope.parameters, key, 1.0) for key in ("factor", "original_max_position_embeddings") if rope.kind == "yarn"]
    return DecoderShape(
        vocab_size=whole_number(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=whole_number(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_eps=_real(config, "rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=max(rope.max_positions, int(math.prod(yarn))),  # model cards add YaRN and leave `max_position_embeddings`
        windows=windows or (None,) * num_layers,
        rope=rope,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        experts=experts,
        activation=activations[activation],
    )


def check_served(config: Mapping[str, object], key: str, served: Collection[object]) -> None:
    """Raises `CheckpointError` where `config` has the key with another value. Null counts as left out."""
    if config.get(key) is not None and config[key] not in served:
        raise CheckpointError(
            f"config.json has {key} {config[key]!r}; this architecture is served with {' or '.join(map(repr, served))} only"
        )


def read_grouped_experts(config: Mapping[str, object], *, scoring: Literal["softmax", "sigmoid"]) -> MixtureShape | None:
    """Experts in DeepSeek's spelling: softmax is DeepSeek-V2's router, sigmoid DeepSeek-V3's and GLM-4.5's. None: all is dense.

    What transformers and the files' own code compute differently, or only one of them does, is refused.
    """
    first, count = whole_number(config, "first_k_dense_replace", 0), whole_number(config, "num_hidden_layers")
    if config.get("n_routed_experts") is None or first >= count:
        return None
    sigmoid = scoring == "sigmoid"
    has_groups = sigmoid or config.get("topk_method") == "group_limited_greedy"
    check_served(config, "topk_method", ("noaux_tc",) if sigmoid else ("greedy", "group_limited_greedy"))
    check_served(config, "scoring_func", (scoring,))
    check_served(config, "moe_layer_freq", (1,))
    check_served(config, "norm_topk_prob", (True, False) if sigmoid else (False,))
    inner = whole_number(config, "moe_intermediate_size")
    return MixtureShape(
        layers=frozenset(range(first, count)),
        num_experts=whole_number(config, "n_routed_experts"),
        inner_size=inner,
        routing=Routing(
            top_k=whole_number(config, "num_experts_per_tok"),
            scoring=scoring,
            num_groups=whole_number(config, "n_group", 1) if has_groups else 1,
            top_groups=whole_number(config, "topk_group", 1) if has_groups else 1,
            group_score="top2" if sigmoid else "max",
            renormalise=sigmoid and bool(config.get("norm_topk_prob", True)),
            scale=_real(config, "routed_scaling_factor", 1.0),
        ),
        shared_size=inner * whole_number(config, "n_shared_experts", 0),
        correction_bias=sigmoid,
        wide_router=True,
    )


def read_latents(config: Mapping[str, object]) -> LatentFacts:
    """The sizes of multi-head latent attention in DeepSeek's spelling."""
    return LatentFacts(
        rank=whole_number(config, "kv_lora_rank"),
        rope_dim=whole_number(config, "qk_rope_head_dim"),
        nope_dim=whole_number(config, "qk_nope_head_dim"),
        value_dim=whole_number(config, "v_head_dim"),
    )


def latent_softmax_scale(head_dim: int, rope: RopeShape) -> float:
    """Of q . k in latent attention: 1 / sqrt(head_dim); with `mscale_all_dim`, times the square of YaRN's factor.

    As in modeling_deepseek_v2.py (arXiv:2309.00071). Raises `CheckpointError` where the factor is not stated.
    """
    weight = float(rope.parameters.get("mscale_all_dim") or 0)
    if rope.kind == "default" or not weight:
        return 1 / math.sqrt(head_dim)
    if rope.parameters.get("factor") is None:
        raise CheckpointError(f"config.json has rope type {rope.kind!r} with 'mscale_all_dim' and without 'factor'; it needs both")
    factor = float(rope.parameters["factor"])
    mscale = 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
    return mscale * mscale / math.sqrt(head_dim)


def read_windows(config: Mapping[str, Any], is_windowed: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer, None for none: by `layer_types`; in files without them, by its index."""
    count = whole_number(config, "num_hidden_layers")
    kinds = config.get("layer_types") or [WINDOWED if is_windowed(index) else EVERYTHING for index in range(count)]
    if len(kinds) != count or set(kinds) - {WINDOWED, EVERYTHING}:
        raise CheckpointError(
            f"config.json has layer_types {kinds!r}; it needs {WINDOWED!r} or {EVERYTHING!r} for each of {count} layers"
        )
    window = whole_number(config, "sliding_window")
    return tuple(window if kind == WINDOWED else None for kind in kinds)
