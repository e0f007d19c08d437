"""Recurrent layers that backends are tried on: the rules by what is claimed, sizes, random weights and inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

import torch

from enginery.contracts.memory import RecurrentFacts, RecurrentWeights

Claim = tuple[str, str]
RandomFn = Callable[..., torch.Tensor]
_HEADS: Final = ((2, 2), (1, 1), (2, 6))  # of keys and values
_CHANNELS: Final = ((1, 70), (1, 256))
_TAPS: Final = (4, 0, 3)


@dataclass(frozen=True)
class Form:
    """A rule by its name. facts: the layer's, given its sizes."""

    name: str
    facts: functools.partial[RecurrentFacts]

    def __str__(self) -> str:
        return self.name


_facts = functools.partial(functools.partial, RecurrentFacts)
# By what is claimed; the plain one first.
_FORMS: Final[Mapping[Claim, Sequence[Form]]] = {
    ("linear", "constant"): [Form("lightning attention", _facts(rule="linear", decay="constant"))],
    ("linear", "head"): [
        Form("gated linear attention", _facts(rule="linear", decay="head")),
        Form("Mamba2", _facts(rule="linear", decay="head", ssm=True, step_limits=(0.05, 3.0))),
    ],
    ("delta", "head"): [Form("gated delta rule", _facts(rule="delta", decay="head"))],
    ("delta", "channel"): [
        Form("KDA", _facts(rule="delta", decay="channel")),
        Form("KDA with a floor", _facts(rule="delta", decay="channel", gate_floor=-5.0)),
    ],
    ("scan", "channel"): [Form("selective scan", _facts(rule="scan", decay="channel"))],
    ("conv", "constant"): [
        Form("convolution and SiLU", _facts(rule="conv", decay="constant")),
        Form("convolution", _facts(rule="conv", decay="constant", conv_silu=False)),
    ],
}


def recurrent_factors(claimed: Set[Claim], key_dims: Sequence[int]) -> Iterator[tuple[Claim, dict[str, Sequence[object]]]]:
    """The factors of each rule that is claimed and that there is a formula for."""
    for claim, forms in _FORMS.items():
        heads = _HEADS[:2] if claim == ("delta", "channel") else _HEADS
        sizes: dict[str, Sequence[object]] = {"heads": heads, "key dim": key_dims, "value dim": (24, 64), "taps": _TAPS}
        if claim[0] == "scan":
            sizes = {"heads": _CHANNELS, "key dim": (16, 11), "value dim": (1,), "taps": (0,)}
        if claim[0] == "conv":
            sizes = {"heads": _CHANNELS, "key dim": (0,), "value dim": (1,), "taps": (4, 3)}
        if claim in claimed:
            yield claim, {"form": tuple(forms), **sizes}


def recurrence_name(facts: RecurrentFacts) -> str:
    """What it is called, and the taps of its convolution."""
    fitting = [
        form.name
        for form in _FORMS[facts.rule, facts.decay]
        if all(vars(facts)[field] == value for field, value in form.facts.keywords.items())
    ]
    return fitting[-1] + (f", {facts.conv_kernel} taps" if facts.conv_kernel else "")


def random_weights(facts: RecurrentFacts, randn: RandomFn, dtype: torch.dtype) -> RecurrentWeights:
    """Decays of a few tokens and of hundreds. randn: sizes -> float32."""
    heads, width, taps = facts.value_heads, facts.mixed_width, facts.conv_kernel
    conv = (randn(width, taps) * taps**-0.5).to(dtype) if taps else None
    bias = randn(width).to(dtype) if taps == 3 else None
    if facts.rule == "conv":
        return RecurrentWeights(conv=conv, conv_bias=bias)
    skip = randn(heads) if facts.ssm or facts.rule == "scan" else None
    if facts.decay == "constant":
        return RecurrentWeights(conv=conv, conv_bias=bias, skip=skip, log_decay=-0.3 * randn(heads).abs())
    by_key = (heads, facts.key_dim)
    return RecurrentWeights(
        conv=conv,
        conv_bias=bias,
        a_log=randn(*(by_key if facts.rule == "scan" else (heads,))) - 2.0,
        dt_bias=None if facts.rule == "scan" else randn(*(by_key if facts.decay == "channel" else (heads,))),
        skip=skip,
    )


def random_rows(facts: RecurrentFacts, length: int, randn: RandomFn, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """mixed and gates of so many tokens; keys are short, so that what is written does not grow with their dims."""
    mixed, gates = randn(length, facts.mixed_width), randn(length, facts.gates_width)
    queries, keys, values = facts.mixed_widths
    first = values if facts.ssm else queries
    if facts.rule == "linear":
        mixed[:, first : first + keys] *= facts.key_dim**-0.5
    if facts.rule == "scan":
        gates[:, : facts.value_heads] = torch.nn.functional.softplus(gates[:, : facts.value_heads] - 1.0)
    return mixed.to(dtype), gates.to(dtype)
