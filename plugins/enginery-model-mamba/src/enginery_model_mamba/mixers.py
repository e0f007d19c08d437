"""What config.json says of layers with states, without torch. H heads, N dims of a state, G groups of heads that share B and C."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from enginery.api import AttnLayerFacts, CheckpointError, ModelFacts, RecurrentFacts, check_served, whole_number

NO_STEP_LIMITS: Final = (0.0, math.inf)


@dataclass(frozen=True, kw_only=True)
class MixerKeys:
    """What a family calls the sizes of its Mamba2 mixers in config.json.

    inner: H times head dim, where it is stated. expand: the same by the hidden size; None where heads alone say it.
    """

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    conv: str = "mamba_d_conv"
    expand: str | None = "mamba_expand"
    inner: str | None = None
    bias: str = "mamba_proj_bias"
    out_bias: str = "mamba_proj_bias"
    conv_bias: str = "mamba_conv_bias"
    eps: str = "rms_norm_eps"


@dataclass(frozen=True, kw_only=True)
class MixerShape:
    """A Mamba2 mixer (arXiv:2405.21060). gate_first: the SiLU gate comes before the norm. has_norm: there is a norm at all.

    multipliers: of what `in_proj` gives, of its parts z, x, B, C and dt.
    """

    facts: RecurrentFacts
    bias: bool
    out_bias: bool
    conv_bias: bool
    eps: float
    has_norm: bool = True
    gate_first: bool = True
    multipliers: tuple[float, ...] = (1.0,) * 5

    @property
    def inner_size(self) -> int:
        """Values of a token: all heads' dims."""
        return self.facts.value_heads * self.facts.value_dim


def stated(config: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """What config.json states. A key that is null takes its default but for `num_key_value_heads`, which is then that of heads."""
    return {
        key: value for key, value in config.items() if (value is not None or key == "num_key_value_heads") and key not in without
    }


def read_mixer(config: Mapping[str, Any], keys: MixerKeys) -> MixerShape:
    """Read a Mamba2 mixer. Raises `CheckpointError`."""
    check_served(config, "hidden_act", ("silu", "swish"))
    heads, groups = whole_number(config, keys.heads), whole_number(config, keys.groups)
    inner = config.get(keys.inner) if keys.inner is not None else None
    if keys.expand is None:
        inner = heads * whole_number(config, keys.head_dim)
    elif inner is None:
        inner = whole_number(config, keys.expand) * whole_number(config, "hidden_size")
    dim = config.get(keys.head_dim)
    dim = inner // heads if dim in (None, "auto") else whole_number(config, keys.head_dim)
    if heads % groups or heads * dim != inner:
        raise CheckpointError(
            f"config.json has {keys.heads} {heads} of {dim} dims in {groups} groups, for {inner} inner values; heads must "
            "fill them and be a multiple of the groups"
        )
    return MixerShape(
        facts=RecurrentFacts(
            rule="linear",
            decay="head",
            key_heads=groups,
            value_heads=heads,
            key_dim=whole_number(config, keys.state),
            value_dim=dim,
            conv_kernel=whole_number(config, keys.conv),
            ssm=True,
            step_limits=_step_limits(config),
        ),
        bias=bool(config.get(keys.bias, False)),
        out_bias=bool(config.get(keys.out_bias, False)),
        conv_bias=bool(config.get(keys.conv_bias, True)),
        eps=float(config[keys.eps]),
    )


def _step_limits(config: Mapping[str, Any]) -> tuple[float, float]:
    """`time_step_limit`, whose infinity transformers 5 writes as an object, and others as a string."""
    stated = config.get("time_step_limit")
    if stated is None:
        return NO_STEP_LIMITS
    try:
        low, high = (float(limit["__float__"] if isinstance(limit, Mapping) else limit) for limit in stated)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"config.json has time_step_limit {stated!r}, which must be two numbers; the file is damaged"
        ) from error
    return low, high


def memory_of(rule: RecurrentFacts, decoder_layer: int = 0) -> AttnLayerFacts:
    """A layer that keeps the states of `rule`."""
    return AttnLayerFacts(
        num_heads=rule.key_heads, num_kv_heads=rule.key_heads, head_dim=rule.key_dim, recurrent=rule, decoder_layer=decoder_layer
    )


def with_memory(facts: ModelFacts, layers: Sequence[Sequence[AttnLayerFacts]]) -> ModelFacts:
    """`facts` with the layers that have memory of each decoder layer in place of one attention for each."""
    every = tuple(dataclasses.replace(layer, decoder_layer=index) for index, several in enumerate(layers) for layer in several)
    rules = [layer.recurrent for layer in every if layer.recurrent is not None]
    widest = max((rule.mixed_width + 2 * rule.value_heads * rule.value_dim + rule.gates_width for rule in rules), default=0)
    width = max(facts.activation_width, 3 * facts.hidden_size + 4 * widest)
    return dataclasses.replace(facts, layers=every, num_decoder_layers=len(layers), activation_width=width)


def layer_kinds(config: Mapping[str, Any], key: str, served: Mapping[str, str]) -> tuple[str, ...]:
    """`config[key]`, one for each layer, by what they are called in `served`. Raises `CheckpointError`."""
    stated = config[key]
    if not isinstance(stated, list | tuple) or set(stated) - set(served):
        raise CheckpointError(f"config.json has {key} {stated!r}; served are {', '.join(sorted(served))}")
    if "num_hidden_layers" in config and len(stated) != whole_number(config, "num_hidden_layers"):
        raise CheckpointError(f"config.json has {len(stated)} {key} for {config['num_hidden_layers']} layers; the file is damaged")
    return tuple(served[kind] for kind in stated)
