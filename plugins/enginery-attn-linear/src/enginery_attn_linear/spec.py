"""What it can do."""

from __future__ import annotations

from enginery.api import AttnBackendSpec, Capabilities, Phase

RECURRENCES = frozenset(
    {("linear", "constant"), ("linear", "head"), ("delta", "head"), ("delta", "channel"), ("scan", "channel"), ("conv", "constant")}
)
DTYPES = frozenset({"float32", "bfloat16", "float16"})


LINEAR = AttnBackendSpec(
    name="linear",
    api=(2, 0),
    priority=10,
    summary="recurrent layers in plain torch",
    capabilities=Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=DTYPES,
        kv_dtypes=DTYPES,
        phases=frozenset({Phase.PREFILL, Phase.DECODE, Phase.MIXED, Phase.VERIFY}),
        causal=False,
        recurrences=RECURRENCES,
        prompt_checkpoints=True,
    ),
)
