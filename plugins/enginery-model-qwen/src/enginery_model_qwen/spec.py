"""What config.json says, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from enginery.api import (
    AttnLayerFacts,
    DecoderShape,
    ExpertNames,
    MixtureShape,
    Model,
    ModelContext,
    ModelFacts,
    RecurrentFacts,
    Routing,
    next_token_drafter,
    read_decoder_shape,
    required,
    rotating_whole_heads,
    whole_number,
)

QWEN3_HEAD_DIM = 128  # transformers' Qwen3Config, for files that leave it out


# transformers' Qwen3NextConfig, for files that leave them out
NEXT_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "norm_topk_prob": True,
    "full_attention_interval": 4,
}
# and Qwen3_5TextConfig
DENSE_35_DEFAULTS = NEXT_DEFAULTS | {"num_key_value_heads": 4}

DENSE_35 = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
MOE_35 = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")


def is_35(config: Mapping[str, Any]) -> bool:
    """Whether it is a Qwen3.5."""
    return any(name in config["architectures"] for name in (*DENSE_35, *MOE_35))


def is_next(config: Mapping[str, Any]) -> bool:
    """Whether it is a Qwen3-Next or a Qwen3.5, most of whose layers are recurrent."""
    return "Qwen3NextForCausalLM" in config["architectures"] or is_35(config)


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says of the text model, where it stands beside one for images. The head is that of both."""
    if "text_config" not in config:
        return config
    outer = ("architectures", "tie_word_embeddings")
    return {**config, **config["text_config"], **{key: config[key] for key in outer if config.get(key) is not None}}


def shape(config: Mapping[str, Any]) -> DecoderShape:
    """What config.json says. Refuses a part of each head to rotate where transformers rotates all of it: before Qwen3-Next."""
    return _shape(config) if is_next(config) else rotating_whole_heads(_shape(config))


def _shape(config: Mapping[str, Any]) -> DecoderShape:
    """Qwen2 has biases on q, k and v, Qwen3 a norm on each head of q and k instead; their windows; experts where they have them."""
    config = _without_chunks(config)
    if "Qwen2ForCausalLM" in config["architectures"]:
        return read_decoder_shape(config, _windows(config), qkv_bias=True)
    if "Qwen2MoeForCausalLM" in config["architectures"]:
        experts = _experts(config, shared_size=int(required(config, "shared_expert_intermediate_size")))
        return read_decoder_shape(config, _expert_windows(config), qkv_bias=bool(config.get("qkv_bias", True)), experts=experts)
    config = text_of(config)
    bias = bool(config.get("attention_bias", False))
    if is_35(config):
        return _shape_35(config, bias=bias)
    if "Qwen3MoeForCausalLM" in config["architectures"]:
        experts = _experts(config, shared_size=0)
        return read_decoder_shape(config, _expert_windows(config), qkv_bias=bias, out_bias=bias, qk_norm=True, experts=experts)
    if is_next(config):
        config = {**NEXT_DEFAULTS, **config}
        experts = _experts(config, shared_size=int(required(config, "shared_expert_intermediate_size")))
        plain = read_decoder_shape(config, qkv_bias=bias, out_bias=bias, qk_norm=True, experts=experts)
        return dataclasses.replace(plain, norm_offset=1.0)
    config = {"head_dim": QWEN3_HEAD_DIM, **config}
    return read_decoder_shape(config, _windows(config), qkv_bias=bias, out_bias=bias, qk_norm=True)


def _without_chunks(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of Qwen2.5-1M and the like, contexts for which they need no dual chunk attention (arXiv:2402.17463), which is not served."""
    chunks = config.get("dual_chunk_attention_config")
    if not chunks:
        return config
    trained = whole_number(chunks, "original_max_position_embeddings")
    return {**config, "max_position_embeddings": min(trained, whole_number(config, "max_position_embeddings"))}


def _shape_35(config: Mapping[str, Any], *, bias: bool) -> DecoderShape:
    """Qwen3.5's: experts in every layer or none. Beside a model for images its weights have a longer name."""
    has_experts = any(name in config["architectures"] for name in MOE_35)
    config, experts = {**(NEXT_DEFAULTS if has_experts else DENSE_35_DEFAULTS), **config}, None
    if has_experts:
        shared = int(required(config, "shared_expert_intermediate_size"))
        config = {**config, "intermediate_size": shared or config.get("moe_intermediate_size"), "norm_topk_prob": True}
        experts = _experts(config, shared_size=shared)
    plain = read_decoder_shape(config, qkv_bias=bias, out_bias=bias, qk_norm=True, experts=experts)
    stem = "model.language_model" if "text_config" in config else "model"
    return dataclasses.replace(plain, norm_offset=1.0, stem=stem)


def _experts(config: Mapping[str, Any], *, shared_size: int) -> MixtureShape | None:
    """Every `decoder_sparse_step`-th layer has experts but for `mlp_only_layers`. None: all is dense.

    The hub calls their number `num_experts`, transformers writes `num_local_experts`.
    """
    step, dense = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    layers = frozenset(range(step - 1, whole_number(config, "num_hidden_layers"), step)) - frozenset(dense)
    key = "num_local_experts" if "num_experts" not in config and "num_local_experts" in config else "num_experts"
    if not layers or config.get(key) == 0:
        return None
    return MixtureShape(
        layers=layers,
        num_experts=whole_number(config, key),
        inner_size=whole_number(config, "moe_intermediate_size"),
        routing=Routing(top_k=whole_number(config, "num_experts_per_tok"), renormalise=bool(config.get("norm_topk_prob", False))),
        shared_size=shared_size,
        shared_gate=shared_size > 0,
        names=ExpertNames(shared="shared_expert"),
    )


def _expert_windows(config: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    """If it is switched on, Qwen2-MoE has the window where `layer_types` says so, Qwen3-MoE on all layers."""
    if not config.get("use_sliding_window", False):
        return None
    window, num_layers = whole_number(config, "sliding_window"), whole_number(config, "num_hidden_layers")
    if "Qwen3MoeForCausalLM" in config["architectures"]:
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in required(config, "layer_types"))


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Layers from `max_window_layers` on have the window, if it is switched on and not null; `layer_types` overrides that."""
    num_layers, stated = whole_number(config, "num_hidden_layers"), {"sliding_window": 4096, **config}
    is_on = config.get("use_sliding_window", False) and stated["sliding_window"] is not None
    window = whole_number(stated, "sliding_window", 4096) if is_on else None
    first = 28 if config.get("max_window_layers") is None else int(config["max_window_layers"])
    kinds = config.get("layer_types") or [
        "sliding_attention" if index >= first else "full_attention" for index in range(num_layers)
    ]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    facts = shape(config).facts()
    return _with_recurrent_layers(facts, {**NEXT_DEFAULTS, **text_of(config)}) if is_next(config) else facts


def _with_recurrent_layers(facts: ModelFacts, config: Mapping[str, Any]) -> ModelFacts:
    """Every `full_attention_interval`-th layer has attention, the others a gated delta net; `layer_types` overrides that."""
    interval = whole_number(config, "full_attention_interval")
    every = [
        "linear_attention" if (index + 1) % interval else "full_attention"
        for index in range(whole_number(config, "num_hidden_layers"))
    ]
    rule = RecurrentFacts(
        rule="delta",
        decay="head",
        key_heads=whole_number(config, "linear_num_key_heads"),
        value_heads=whole_number(config, "linear_num_value_heads"),
        key_dim=whole_number(config, "linear_key_head_dim"),
        value_dim=whole_number(config, "linear_value_head_dim"),
        conv_kernel=whole_number(config, "linear_conv_kernel_dim"),
    )
    recurrent = AttnLayerFacts(num_heads=rule.key_heads, num_kv_heads=rule.key_heads, head_dim=rule.key_dim, recurrent=rule)
    layers = tuple(
        dataclasses.replace(recurrent, decoder_layer=layer.decoder_layer) if kind == "linear_attention" else layer
        for kind, layer in zip(config.get("layer_types") or every, facts.layers, strict=True)
    )
    width = 2 * facts.hidden_size + 4 * (rule.mixed_width + rule.value_heads * rule.value_dim)
    return dataclasses.replace(facts, layers=layers, activation_width=max(facts.activation_width, width))


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_qwen.model import build_decoder

    return build_decoder(context)


def _num_modules(config: Mapping[str, Any]) -> int:
    """Layers of `mtp`, each of which predicts one token more. Files that say nothing have one, as Qwen3-Next's."""
    text = text_of(config)
    return int(text.get("mtp_num_hidden_layers", text.get("num_nextn_predict_layers", 1)) or 0)


def module_shape(config: Mapping[str, Any]) -> DecoderShape:
    """Of the layers in `mtp`, which have attention."""
    return shape(config).one_more(_num_modules(config))


def build_module(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_qwen.model import build_module

    return build_module(context)


MTP = next_token_drafter(
    "Qwen3NextForCausalLM",
    *DENSE_35,
    *MOE_35,
    describe=lambda config: module_shape(config).facts(),
    build=build_module,
    modules=_num_modules,
    suits=lambda config: _num_modules(config) > 0,
    point="final",
)
