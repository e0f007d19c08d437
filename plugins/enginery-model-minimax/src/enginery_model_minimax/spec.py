"""What config.json says, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from enginery.api import (
    AttnLayerFacts,
    CheckpointError,
    DecoderShape,
    ExpertNames,
    MixtureShape,
    Model,
    ModelContext,
    ModelFacts,
    RecurrentFacts,
    Routing,
    check_served,
    read_decoder_shape,
    required,
    whole_number,
)

M2: Final = "MiniMaxM2ForCausalLM"
HUB_TEXT: Final = ("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM")
TEXT: Final = ("MiniMaxForCausalLM", *HUB_TEXT)
TEXT_NAMES: Final = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
M2_NAMES: Final = dataclasses.replace(TEXT_NAMES, correction="e_score_correction_bias")
LINEAR, FULL = "linear_attention", "full_attention"

# For files that leave them out: the defaults of transformers' MiniMaxM2Config and MiniMaxConfig.
M2_DEFAULTS: Final[dict[str, Any]] = {"head_dim": 128, "rope_theta": 5e6, "rms_norm_eps": 1e-6}
TEXT_DEFAULTS: Final[dict[str, Any]] = {"rope_theta": 1e6, "rms_norm_eps": 1e-5}


@dataclass(frozen=True, kw_only=True)
class Residual:
    """alpha: of the residual stream, beta: of what a block adds to it."""

    alpha: float
    beta: float


@dataclass(frozen=True, kw_only=True)
class TextShape:
    """decoder: what is not recurrent. linear: by layer, whether it is. full_residual, linear_residual, mlp_residual: scales."""

    decoder: DecoderShape
    linear: tuple[bool, ...]
    full_residual: Residual
    linear_residual: Residual
    mlp_residual: Residual

    def facts(self) -> ModelFacts:
        """The part that the core needs."""
        decoder = self.decoder
        rule = RecurrentFacts(
            rule="linear",
            decay="constant",
            key_heads=decoder.num_heads,
            value_heads=decoder.num_heads,
            key_dim=decoder.head_dim,
            value_dim=decoder.head_dim,
        )
        recurrent = AttnLayerFacts(num_heads=rule.key_heads, num_kv_heads=rule.key_heads, head_dim=rule.key_dim, recurrent=rule)
        facts = decoder.facts()
        layers = tuple(
            dataclasses.replace(recurrent, decoder_layer=layer.decoder_layer) if linear else layer
            for linear, layer in zip(self.linear, facts.layers, strict=True)
        )
        width = 3 * facts.hidden_size + 10 * rule.value_heads * rule.value_dim
        return dataclasses.replace(facts, layers=layers, activation_width=max(facts.activation_width, width))

    def log_decay(self, layer: int) -> tuple[float, ...]:
        """Of each head: minus its slope as in ALiBi (arXiv:2108.12409), which is less steep in later layers."""
        heads = self.decoder.num_heads
        factor = 1 - layer / (len(self.linear) - 1 + 1e-5) + 1e-5
        return tuple(-(2.0 ** (-8 * (head + 1) / heads)) * factor for head in range(heads))


def is_m2(config: Mapping[str, Any]) -> bool:
    """Whether it is a MiniMax-M2."""
    return M2 in config["architectures"]


def _with_rotary_dim(config: Mapping[str, Any]) -> dict[str, Any]:
    """Hub files state how many dims of a head are rotated; transformers 5 writes their part."""
    if config.get("rotary_dim") is None:
        return dict(config)
    return {**config, "partial_rotary_factor": whole_number(config, "rotary_dim") / whole_number(config, "head_dim")}


def _refuse(config: Mapping[str, Any], **served: object) -> None:
    for key, value in served.items():
        check_served(config, key, (value,))


def _experts(config: Mapping[str, Any], *, sigmoid: bool) -> MixtureShape:
    return MixtureShape(
        layers=frozenset(range(whole_number(config, "num_hidden_layers"))),
        num_experts=whole_number(config, "num_local_experts"),
        inner_size=whole_number(config, "intermediate_size"),
        routing=Routing(
            top_k=whole_number(config, "num_experts_per_tok"), scoring="sigmoid" if sigmoid else "softmax", renormalise=True
        ),
        correction_bias=sigmoid,
        names=M2_NAMES if sigmoid else TEXT_NAMES,
    )


def m2_shape(config: Mapping[str, Any]) -> DecoderShape:
    """MiniMax-M2's shape. Raises `CheckpointError` for what is not served."""
    config = _with_rotary_dim({**M2_DEFAULTS, **config})
    _refuse(
        config,
        scoring_func="sigmoid",
        use_routing_bias=True,
        use_qk_norm=True,
        qk_norm_type="per_layer",
        shared_intermediate_size=0,
        sliding_window=None,
    )
    if 0 in (config.get("attn_type_list") or ()):
        raise CheckpointError("config.json has lightning attention in attn_type_list; this architecture is served without")
    return read_decoder_shape(config, experts=_experts(config, sigmoid=True))


def text_shape(config: Mapping[str, Any]) -> TextShape:
    """MiniMax-Text-01's shape, in the hub's spelling and that of transformers. Raises `CheckpointError` for what is not served."""
    on_hub = any(name in config["architectures"] for name in HUB_TEXT)
    config = {**TEXT_DEFAULTS, **config}
    _refuse(config, postnorm=True, shared_intermediate_size=0, sliding_window=None)
    if on_hub:
        config = _with_rotary_dim(config)
    decoder = read_decoder_shape(config, experts=_experts(config, sigmoid=False))
    if decoder.rope.rotary_dim != decoder.head_dim and not on_hub:
        raise CheckpointError(
            "config.json has a partial_rotary_factor; transformers rotates whole heads here, so the two contradict each other: "
            f"name {HUB_TEXT[0]} in 'architectures', or take it out"
        )
    count = len(decoder.windows)
    kinds = config.get("layer_types") or [
        (LINEAR, FULL)[kind] for kind in config.get("attn_type_list") or [(index + 1) % 2 for index in range(count)]
    ]
    if len(kinds) != count or set(kinds) - {LINEAR, FULL}:
        raise CheckpointError(f"config.json has layer_types {kinds!r}; it needs {LINEAR!r} or {FULL!r} for each of {count} layers")

    def residual(here: str, hub: str) -> Residual:
        alpha, beta = (_factor(config, f"{here}_{name}_factor", f"layernorm_{hub}_{name}") for name in ("alpha", "beta"))
        return Residual(alpha=alpha, beta=beta)

    return TextShape(
        decoder=decoder,
        linear=tuple(kind == LINEAR for kind in kinds),
        full_residual=residual("full_attn", "full_attention"),
        linear_residual=residual("linear_attn", "linear_attention"),
        mlp_residual=residual("mlp", "mlp"),
    )


def _factor(config: Mapping[str, Any], here: str, hub: str) -> float:
    """Of transformers 5's name, or the hub's; 1 where neither is stated."""
    key = here if here in config else hub
    return float(required({key: 1.0, **config}, key))


def ignored_by_m2(config: Mapping[str, Any]) -> list[str]:
    """Of the layers behind the last, which predict further tokens."""
    first, count = whole_number(config, "num_hidden_layers"), whole_number(config, "num_mtp_modules", 0)
    return [f"model.layers.{first + index}.*" for index in range(count)]


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    return m2_shape(config).facts() if is_m2(config) else text_shape(config).facts()


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_minimax.model import build_m2, build_text

    return build_m2(context) if is_m2(context.config) else build_text(context)
