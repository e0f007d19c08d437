"""What it can do."""

from __future__ import annotations

from importlib.util import find_spec

from enginery.api import AttnBackendSpec, AttnNeeds, Capabilities, Phase, Reason


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
    summary="recurrent layers: prefills in chunks by fla-core, decoding in Triton",
    refuse_also=refuse_also,
    capabilities=Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        kv_dtypes=frozenset({"bfloat16", "float16"}),
        min_compute_capability=(8, 0),
        phases=frozenset({Phase.PREFILL, Phase.DECODE, Phase.MIXED, Phase.VERIFY}),
        causal=False,
        recurrences=RECURRENCES,
        graphs=True,
        needs_jit=True,
    ),
)
