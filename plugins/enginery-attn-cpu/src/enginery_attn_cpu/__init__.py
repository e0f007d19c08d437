"""Attention of decoding steps on CPUs, in compiled kernels."""

from enginery.api import AttnBackend, AttnBackendSpec, BackendContext, hookimpl
from enginery_attn_cpu.spec import CPU


@hookimpl
def register_attn_backends() -> list[AttnBackendSpec]:
    """One backend, for decoding and for verifying drafts."""
    return [CPU]


@hookimpl
def create_attn_backend(name: str, context: BackendContext) -> AttnBackend | None:
    """Build it."""
    if name != CPU.name:
        return None
    from enginery_attn_cpu.backend import CpuAttention

    return CpuAttention(context)
