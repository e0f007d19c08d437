"""Recurrent layers whose prefills run in chunks."""

from enginery.api import AttnBackend, AttnBackendSpec, BackendContext, hookimpl
from enginery_attn_fla.spec import FLA


@hookimpl
def register_attn_backends() -> list[AttnBackendSpec]:
    """One backend, for CUDA devices."""
    return [FLA]


@hookimpl
def create_attn_backend(name: str, context: BackendContext) -> AttnBackend | None:
    """Import the kernels, which takes seconds, and build it. Of a model without delta rules it is all enginery-attn-delta's."""
    if name != FLA.name:
        return None
    if all(layer.recurrent is None or layer.recurrent.rule != "delta" for layer in context.geometry.layers):
        from enginery_attn_delta.backend import DeltaAttention

        return DeltaAttention(context)
    from enginery_attn_fla.backend import ChunkedAttention
    from enginery_attn_fla.kernels import load_kernels

    return ChunkedAttention(context, load_kernels())
