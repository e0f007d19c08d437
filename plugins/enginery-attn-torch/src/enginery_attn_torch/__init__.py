"""Paged attention in plain torch."""

from enginery.api import AttnBackend, AttnBackendSpec, BackendContext, hookimpl
from enginery_attn_torch.spec import TORCH


@hookimpl
def register_attn_backends() -> list[AttnBackendSpec]:
    """One backend, for every device."""
    return [TORCH]


@hookimpl
def create_attn_backend(name: str, context: BackendContext) -> AttnBackend | None:
    """Build it."""
    if name != TORCH.name:
        return None
    from enginery_attn_torch.backend import TorchAttention

    return TorchAttention(context)
