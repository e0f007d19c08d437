"""What config.json says, without torch: in the hub's spelling (`swa_..`, lists of 0 and 1) and in that of transformers 5."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from enginery.api import (
    CheckpointError,
    DecoderShape,
    MixtureShape,
    Model,
    ModelContext,
    ModelFacts,
    NormNames,
    Routing,
    check_served,
    next_token_drafter,
    num_next_layers,
    read_decoder_shape,
    read_rope,
    whole_number,
)

WINDOW, EVERYTHING = "sliding_attention", "full_attention"
SPARSE, DENSE = "sparse", "dense"

# For files that leave them out: the defaults of transformers' MiMoV2FlashConfig.
DEFAULTS: Final[dict[str, Any]] = {
    "head_dim": 192,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "sliding_window": 129,
    "rope_theta": 5e6,
    "swa_rope_theta": 1e4,
    "partial_rotary_factor": 0.334,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 3,  # the checkpoints have three, their config.json does not say so
}


def shape(config: Mapping[str, Any]) -> DecoderShape:
    """Windows with sinks and KV heads of their own between layers that see everything; values of another width than keys."""
    config = _complete(config)
    count = whole_number(config, "num_hidden_layers")
    windowed = _kinds(config, "layer_types", "hybrid_layer_pattern", (EVERYTHING, WINDOW), _default_windows(count))
    ropes = config.get("rope_parameters") or {}
    if EVERYTHING in ropes or WINDOW in ropes:  # as transformers 5 writes it
        local = config | {"rope_parameters": ropes.get(WINDOW, ropes.get(EVERYTHING))}
        config |= {"rope_parameters": ropes.get(EVERYTHING, ropes.get(WINDOW))}
    else:
        local = config | {"rope_theta": config["swa_rope_theta"]}
    window, bias = _window(config), bool(config.get("attention_bias", False))
    windows = tuple(window if is_windowed else None for is_windowed in windowed)
    plain = read_decoder_shape(config, windows, qkv_bias=bias, experts=_experts(config, count))
    return dataclasses.replace(
        plain,
        window_rope=read_rope(local, plain.head_dim),
        v_head_dim=whole_number(config, "v_head_dim"),
        window_kv_heads=whole_number(config, "swa_num_key_value_heads", 2 * plain.num_kv_heads),
        sinks=_sinks(config, windowed),
    )


def _complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """With what the file leaves out. Refuses windows whose heads differ in more than the number of KV heads."""
    stated = {key: value for key, value in config.items() if value is not None}
    if "layernorm_epsilon" in stated:
        stated.setdefault("rms_norm_eps", stated["layernorm_epsilon"])
    complete = DEFAULTS | stated
    for key in ("num_attention_heads", "head_dim", "v_head_dim"):
        own = complete.get(f"swa_{key}", complete.get(key))
        if own != complete.get(key):
            raise CheckpointError(f"config.json has swa_{key} {own!r} and {key} {complete.get(key)!r}; served are equal ones")
    if complete.get("n_shared_experts"):
        raise CheckpointError("config.json has n_shared_experts; this architecture is served without shared experts only")
    check_served(complete, "scoring_func", ("sigmoid",))
    check_served(complete, "topk_method", ("noaux_tc",))
    return complete


def _window(config: Mapping[str, Any]) -> int:
    """Tokens that a token sees, itself among them. The hub's `sliding_window_size` counts those before it."""
    before = config.get("sliding_window_size")
    return whole_number(config, "sliding_window") if before is None else whole_number(config, "sliding_window_size") + 1


def _sinks(config: Mapping[str, Any], windowed: Sequence[bool]) -> frozenset[int]:
    """Layers with sinks: those with a window, unless the file says otherwise."""
    of_windows = bool(config.get("add_swa_attention_sink_bias", True))
    of_others = bool(config.get("add_full_attention_sink_bias", False))
    return frozenset(index for index, is_windowed in enumerate(windowed) if (of_windows if is_windowed else of_others))


def _kinds(config: Mapping[str, Any], key: str, hubs: str, names: tuple[str, str], default: Sequence[bool]) -> tuple[bool, ...]:
    """Which layers are of the second of two kinds: by name under `key`, by 0 and 1 under `hubs`."""
    stated = config.get(key)
    if stated is None:
        stated = config.get(hubs, default)
        if not isinstance(stated, list | tuple):
            raise CheckpointError(f"config.json has {hubs} {stated!r}, which must be a list of 0 or 1 for each layer")
        stated = [names[bool(each)] for each in stated]
    if len(stated) != len(default) or set(stated) - set(names):
        raise CheckpointError(
            f"config.json has {key} (or {hubs}) {stated!r}; it needs {names[0]!r} or {names[1]!r} for each of {len(default)} layers"
        )
    return tuple(name == names[1] for name in stated)


def _default_windows(count: int) -> tuple[bool, ...]:
    """All but the first layer and each sixth."""
    return tuple(index > 0 and (index + 1) % 6 > 0 for index in range(count))


def _experts(config: Mapping[str, Any], count: int) -> MixtureShape | None:
    """DeepSeek-V3's, without a shared one, in all layers but the first."""
    sparse = _kinds(config, "mlp_layer_types", "moe_layer_freq", (DENSE, SPARSE), (False,) + (True,) * (count - 1))
    if not any(sparse):
        return None
    scale = config.get("routed_scaling_factor", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise CheckpointError(f"config.json has routed_scaling_factor {scale!r}, which must be a number; the file is damaged")
    return MixtureShape(
        layers=frozenset(index for index, is_sparse in enumerate(sparse) if is_sparse),
        num_experts=whole_number(config, "n_routed_experts"),
        inner_size=whole_number(config, "moe_intermediate_size"),
        routing=Routing(
            top_k=whole_number(config, "num_experts_per_tok"),
            scoring="sigmoid",
            num_groups=whole_number(config, "n_group", 1),
            top_groups=whole_number(config, "topk_group", 1),
            group_score="top2",
            renormalise=bool(config["norm_topk_prob"]),
            scale=float(scale),
        ),
        correction_bias=True,
        wide_router=True,
    )


def value_scale(config: Mapping[str, Any]) -> float:
    """What values are multiplied by: 0.707 where the file says nothing, 1 where it says null."""
    scale = config.get("attention_value_scale", 0.707)
    if isinstance(scale, bool) or not isinstance(scale, int | float | None):
        raise CheckpointError(f"config.json has attention_value_scale {scale!r}, which must be a number; the file is damaged")
    return 1.0 if scale is None else float(scale)


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    value_scale(config)
    return shape(config).facts()


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_mimo.model import build_decoder

    return build_decoder(context)


def num_modules(config: Mapping[str, Any]) -> int:
    """Layers of `model.mtp`, each of which predicts one token more."""
    return num_next_layers(_complete(config))


def module_shape(config: Mapping[str, Any]) -> DecoderShape:
    """Of the layers of `model.mtp`: as those with windows, and dense."""
    whole, count = shape(config), num_modules(config)
    assert whole.window_rope is not None, "windows have angles of their own"
    return dataclasses.replace(
        whole,
        windows=(_window(_complete(config)),) * count,
        rope=whole.window_rope,
        window_rope=None,
        experts=None,
        sinks=frozenset(range(count)) if config.get("add_swa_attention_sink_bias", True) else frozenset(),
        norms=NormNames(mlp="pre_mlp_layernorm"),
    )


def build_modules(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_mimo.model import build_modules

    return build_modules(context)


# What a checkpoint calls its tensors and what they are called here.
SINKS: Final = {".self_attn.attention_sink_bias": (".self_attn.sinks",)}

MTP: Final = next_token_drafter(
    "MiMoV2FlashForCausalLM",
    describe=lambda config: module_shape(config).facts(),
    build=build_modules,
    modules=num_modules,
    suits=lambda config: bool(_complete(config)["num_nextn_predict_layers"]),
    stacked_weights=SINKS,
)
