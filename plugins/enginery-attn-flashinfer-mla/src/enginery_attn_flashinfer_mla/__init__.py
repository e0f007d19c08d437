"""Multi-head latent attention by FlashInfer."""

from enginery.api import AttnBackend, AttnBackendSpec, BackendContext, hookimpl
from enginery_attn_flashinfer_mla.spec import NAME, make_spec


@hookimpl
def register_attn_backends() -> list[AttnBackendSpec]:
    """One backend, for CUDA devices."""
    return [make_spec()]


@hookimpl
def create_attn_backend(name: str, context: BackendContext) -> AttnBackend | None:
    """Build it, with kernels loaded or compiled."""
    if name != NAME:
        return None
    from enginery_attn_flashinfer_mla.backend import FlashInferMla
    from enginery_attn_flashinfer_mla.kernels import FlashInferKernels

    return FlashInferMla(context, FlashInferKernels)
