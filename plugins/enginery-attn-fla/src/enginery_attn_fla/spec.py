"""What it can do."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from enginery.api import AttnBackendSpec, AttnNeeds, Capabilities, Phase, Reason


@dataclass(frozen=True)
class FlaOptions:
    """by_token: up to eight prompts of a step of which none has more tokens, up to sixteen with half as many, and so on, run token
    by token, as decoding does: the chunked kernels' launches would take the host longer. 0: none does.
    """

    by_token: int = 128

    def __post_init__(self) -> None:
        if self.by_token < 0:
            raise ValueError(f"by_token is {self.by_token}; give the number of tokens of the longest such prompt, or 0")


def refuse_also(needs: AttnNeeds) -> list[Reason]:
    """A machine without fla-core; sizes that its kernels or those of decoding cannot do."""
    from enginery_attn_delta.spec import refuse_also as refused_by_delta

    reasons = refused_by_delta(needs)
    for module in ("fla", "einops"):
        if find_spec(module) is None:
            reasons.append(Reason(rule="installed", text=f"{module} is not installed: pip install 'enginery-attn-fla[kernels]'"))
    return reasons


RECURRENCES = frozenset(
    {("linear", "constant"), ("linear", "head"), ("delta", "head"), ("delta", "channel"), ("scan", "channel"), ("conv", "constant")}
)
FLA = AttnBackendSpec(
    name="fla",
    api=(2, 0),
    priority=60,
    summary="recurrent layers: prefills of delta rules in chunks by fla-core, the rest in Triton",
    refuse_also=refuse_also,
    options=FlaOptions,
    capabilities=Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        kv_dtypes=frozenset({"bfloat16", "float16"}),
        min_compute_capability=(8, 0),
        phases=frozenset({Phase.PREFILL, Phase.DECODE, Phase.MIXED, Phase.VERIFY}),
        causal=False,
        recurrences=RECURRENCES,
        prompt_checkpoints=True,
        graphs=True,
        needs_jit=True,
    ),
)
