"""What it can do."""

from __future__ import annotations

from enginery.api import AttnBackendSpec, AttnNeeds, Capabilities, HostCalls, Phase, Reason

DTYPES = frozenset({"float32", "bfloat16"})


def _refuse(needs: AttnNeeds) -> list[Reason]:
    from enginery_attn_cpu import native_part

    if native_part.kernels is None:
        text = (
            "enginery-attn-cpu was installed without its compiled part; install a C++ compiler and Python's headers, and the "
            f"package again ({native_part.why_absent})"
        )
        return [Reason(rule="compiled part", text=text)]
    most = native_part.kernels.max_dim
    wide = sorted({dim for layer in needs.layers for dim in (layer.head_dim, layer.value_dim) if dim > most})
    return [Reason(rule="head dim", text=f"head dim {dim} is more than {most}") for dim in wide]


def _record_calls(calls: HostCalls | None) -> None:
    from enginery_attn_cpu import native_part

    assert native_part.kernels is not None, "it was refused"
    native_part.kernels.record_calls(calls)


CPU = AttnBackendSpec(
    name="cpu",
    api=(2, 0),
    priority=20,
    summary="compiled, for CPUs",
    capabilities=Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=DTYPES,
        kv_dtypes=DTYPES,
        sliding_window=True,
        softcap=True,
        sinks=True,
        phases=frozenset({Phase.PREFILL, Phase.DECODE, Phase.MIXED, Phase.VERIFY}),
        unequal_values=True,
        graphs=True,
        batch_invariant=True,
        trees=True,
    ),
    refuse_also=_refuse,
    record_calls=_record_calls,
)
