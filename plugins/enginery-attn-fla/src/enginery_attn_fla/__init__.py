"""Recurrent layers whose prefills run in chunks."""

from enginery.api import AttnBackend, AttnBackendSpec, BackendContext, hookimpl
from enginery_attn_fla.spec import FLA


@hookimpl
def register_attn_backends() -> list[AttnBackendSpec]:
    """One backend, for CUDA devices."""
    return [FLA]


@hookimpl
def create_attn_backend(name: str, context: BackendContext) -> AttnBackend | None:
    """Import the kernels, which takes seconds, and build it."""
    if name != FLA.name:
        return None
    from enginery_attn_fla.backend import ChunkedAttention
    from enginery_attn_fla.kernels import load_kernels

    return ChunkedAttention(context, load_kernels())
