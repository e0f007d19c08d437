"""The shape of a dense decoder as config.json states it, in the hub's spelling and in that of transformers 5.

Shared by the model plugins whose families differ in a few flags (Llama, Mistral, Qwen). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginery.contracts.attention import AttnLayerFacts
from enginery.contracts.model import ModelFacts
from enginery.errors import CheckpointError


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
class DecoderShape:
    """Pre-norm decoder: RMSNorm, rotary GQA, gated SiLU MLP. One sliding window (or None) per layer."""

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

    def facts(self) -> ModelFacts:
        """The part that the core needs."""
        heads = self.num_heads + 2 * self.num_kv_heads
        return ModelFacts(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_positions=self.max_positions,
            activation_width=3 * self.hidden_size + max(2 * heads * self.head_dim, 3 * self.intermediate_size),
            layers=tuple(
                AttnLayerFacts(
                    num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, sliding_window=window
                )
                for window in self.windows
            ),
        )


def required(config: Mapping[str, Any], key: str) -> Any:
    """`config[key]`, or a `CheckpointError` that names the key."""
    if config.get(key) is None:
        raise CheckpointError(f"config.json has no {key!r}, which this architecture needs; the file is incomplete")
    return config[key]


def read_rope(config: Mapping[str, Any], head_dim: int) -> RopeShape:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (hub files)."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    partial = parameters.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if config.get("original_max_position_embeddings") is not None:  # Phi-style files state it outside, and it wins there
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return RopeShape(
        kind=kind,
        theta=float(theta),
        rotary_dim=int(head_dim * partial),
        max_positions=int(required(config, "max_position_embeddings")),
        parameters=parameters,
    )


def read_decoder_shape(
    config: Mapping[str, Any],
    windows: tuple[int | None, ...] | None = None,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderShape:
    """Read what dense decoders have in common; the flags are what a family fixes. Raises `CheckpointError`."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"config.json asks for hidden_act {activation!r}; this architecture is served with 'silu' only")
    num_heads = int(required(config, "num_attention_heads"))
    hidden_size = int(required(config, "hidden_size"))
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(f"config.json has {num_heads=} that is no multiple of {num_kv_heads=}")
    head_dim = int(config.get("head_dim") or hidden_size // num_heads)
    num_layers = int(required(config, "num_hidden_layers"))
    return DecoderShape(
        vocab_size=int(required(config, "vocab_size")),
        hidden_size=hidden_size,
        intermediate_size=int(required(config, "intermediate_size")),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_eps=float(config.get("rms_norm_eps") or 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=int(required(config, "max_position_embeddings")),
        windows=windows or (None,) * num_layers,
        rope=read_rope(config, head_dim),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )
