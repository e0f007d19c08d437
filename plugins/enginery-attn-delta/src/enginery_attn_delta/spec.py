"""What it can do."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Final

from enginery.api import AttnBackendSpec, AttnNeeds, Capabilities, Phase, Reason

NAME: Final = "delta"
DTYPES: Final = frozenset({"float32", "bfloat16", "float16"})
MAX_KEY_DIM: Final = 256  # of a state, a program holds all key dims of some values
MAX_TAPS: Final = 8  # of a convolution, no more than the rows of one of its tiles
RECURRENCES: Final = frozenset(
    {("linear", "constant"), ("linear", "head"), ("delta", "head"), ("delta", "channel"), ("scan", "channel"), ("conv", "constant")}
)


def is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on host tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def make_spec() -> AttnBackendSpec:
    """Interpreted, it is for the CPU, and last in the order: thousands of times slower than anything else there."""
    interpreted = is_interpreted()
    return AttnBackendSpec(
        name=NAME,
        api=(2, 0),
        priority=1 if interpreted else 50,
        summary="recurrent layers in Triton, interpreted: for tests"
        if interpreted
        else "recurrent layers in Triton, token by token",
        refuse_also=refuse_also,
        capabilities=Capabilities(
            devices=frozenset({"cpu"} if interpreted else {"cuda"}),
            dtypes=DTYPES,
            kv_dtypes=DTYPES,
            min_compute_capability=None if interpreted else (8, 0),
            phases=frozenset({Phase.PREFILL, Phase.DECODE, Phase.MIXED, Phase.VERIFY}),
            causal=False,
            recurrences=RECURRENCES,
            prompt_checkpoints=True,
            graphs=True,
            needs_jit=True,
        ),
    )


def refuse_also(needs: AttnNeeds) -> list[Reason]:
    """A machine without Triton, and sizes that a program cannot hold."""
    reasons = []
    if find_spec("triton") is None:
        reasons.append(Reason(rule="installed", text="triton is not installed; torch's CUDA builds bring it, or pip does"))
    for facts in (layer.recurrent for layer in needs.layers):
        if facts is not None and facts.key_dim > MAX_KEY_DIM:
            reasons.append(Reason(rule="key dim", text=f"key dim {facts.key_dim} is more than {MAX_KEY_DIM}"))
        if facts is not None and facts.conv_kernel > MAX_TAPS:
            reasons.append(Reason(rule="convolution", text=f"a convolution of {facts.conv_kernel} tokens is more than {MAX_TAPS}"))
    return list(dict.fromkeys(reasons))
