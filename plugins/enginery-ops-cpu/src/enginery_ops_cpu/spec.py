"""What it offers and where: compiled operations, and what torch alone can do where they were not built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from enginery.api import HostCalls, OpNeeds, OpSpec, Reason, only_torch


def _refuse_compiled(needs: OpNeeds) -> list[Reason]:
    if needs.device != "cpu":
        return [Reason(rule="device", text=f"runs on CPUs only, the device is {needs.device}")]
    if not _why_not_built():
        return []
    text = (
        "the compiled operations were not built: a token of one stream takes about 1.7 times as long; "
        "install a C++ compiler and Python's headers, then this package again"
    )
    return [Reason(rule="compiled", text=text)]


def _why_not_built() -> str:
    from enginery_ops_cpu import native

    return native.WHY_NOT


def _load_compiled(needs: OpNeeds) -> Mapping[str, Callable[..., Any]]:
    from enginery_ops_cpu.compiled import CompiledOps
    from enginery_ops_cpu.native import KERNELS

    assert KERNELS is not None, "it was refused"
    ops = CompiledOps(KERNELS)
    return {name: getattr(ops, name) for name in COMPILED.provides}


def _record_calls(calls: HostCalls | None) -> None:
    from enginery_ops_cpu.native import KERNELS

    assert KERNELS is not None, "it was refused"
    KERNELS.record_calls(calls)


def _refuse(needs: OpNeeds) -> list[Reason]:
    if needs.device != "cpu":
        return [Reason(rule="device", text=f"runs on CPUs only, the device is {needs.device}")]
    if needs.dtype == "bfloat16" and not _packs_bfloat16():
        return [Reason(rule="dtype", text="oneDNN packs no bfloat16 weights on this CPU, which lacks the instructions (AVX-512)")]
    return []


def _packs_bfloat16() -> bool:
    from enginery_ops_cpu import ops

    return ops.packs_bfloat16()


def _load(needs: OpNeeds) -> Mapping[str, Callable[..., Any]]:
    from enginery_ops_cpu import ops

    return {"bind_linear": ops.bind_linear, "rms_norm": ops.rms_norm, "add_rms_norm": ops.add_rms_norm}


COMPILED = OpSpec(
    name="cpu-compiled",
    api=(2, 0),
    priority=12,
    provides=(
        "embed",
        "bind_linear",
        "rms_norm",
        "add_rms_norm",
        "qk_norm_rotary",
        "qk_norm_rotary_write",
        "gated_silu",
        "greedy",
    ),
    refuse=_refuse_compiled,
    load=_load_compiled,
    record_calls=_record_calls,
)
CPU = OpSpec(
    name="cpu",
    api=(2, 0),
    priority=10,
    provides=("bind_linear", "rms_norm", "add_rms_norm"),
    refuse=_refuse,
    load=_load,
    record_calls=only_torch,
)
