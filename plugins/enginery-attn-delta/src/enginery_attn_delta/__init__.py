"""Recurrent layers in Triton."""

from enginery.api import AttnBackend, AttnBackendSpec, BackendContext, hookimpl
from enginery_attn_delta.spec import NAME, make_spec


@hookimpl
def register_attn_backends() -> list[AttnBackendSpec]:
    """One backend: for CUDA devices, or under Triton's interpreter for the CPU."""
    return [make_spec()]


@hookimpl
def create_attn_backend(name: str, context: BackendContext) -> AttnBackend | None:
    """Build it."""
    if name != NAME:
        return None
    from enginery_attn_delta.backend import DeltaAttention

    return DeltaAttention(context)
