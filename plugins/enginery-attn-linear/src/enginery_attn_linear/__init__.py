"""Gated linear attention in plain torch."""

from enginery.api import AttnBackend, AttnBackendSpec, BackendContext, hookimpl
from enginery_attn_linear.spec import LINEAR


@hookimpl
def register_attn_backends() -> list[AttnBackendSpec]:
    """One backend, for recurrent layers on every device."""
    return [LINEAR]


@hookimpl
def create_attn_backend(name: str, context: BackendContext) -> AttnBackend | None:
    """Build it."""
    if name != LINEAR.name:
        return None
    from enginery_attn_linear.backend import LinearAttention

    return LinearAttention(context)
