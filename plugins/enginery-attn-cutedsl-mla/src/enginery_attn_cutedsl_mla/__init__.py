"""Decoding of MLA by FlashInfer's CuTe DSL kernels."""

from enginery.api import AttnBackend, AttnBackendSpec, BackendContext, hookimpl
from enginery_attn_cutedsl_mla.spec import NAME, make_spec


@hookimpl
def register_attn_backends() -> list[AttnBackendSpec]:
    """One backend, for CUDA devices of compute capability 10.x."""
    return [make_spec()]


@hookimpl
def create_attn_backend(name: str, context: BackendContext) -> AttnBackend | None:
    """Build it, around its kernel and beside FlashInfer's."""
    if name != NAME:
        return None
    from enginery_attn_cutedsl_mla.kernel import load_kernel
    from enginery_attn_flashinfer_mla.blackwell import beside_flashinfer

    return beside_flashinfer(context, load_kernel(context))
