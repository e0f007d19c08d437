"""What it can do."""

from __future__ import annotations

from enginery.api import AttnBackendSpec, Capabilities, Phase

DTYPES = frozenset({"float32", "bfloat16", "float16"})

TORCH = AttnBackendSpec(
    name="torch",
    api=(2, 0),
    priority=10,
    summary="plain torch: the reference, correct everywhere",
    capabilities=Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=DTYPES,
        kv_dtypes=DTYPES | {"float8_e4m3fn"},
        sliding_window=True,
        softcap=True,
        sinks=True,
        mla=True,
        mla_ragged=True,
        lse_base="e",
        phases=frozenset({Phase.PREFILL, Phase.DECODE, Phase.MIXED, Phase.VERIFY}),
        unequal_values=True,
        device_lengths=True,
        trees=True,
    ),
)
