"""What a model asks of an attention backend."""

from __future__ import annotations

from enginery.contracts.attention import AttnNeeds
from enginery.contracts.model import ModelFacts


def attn_needs(
    facts: ModelFacts,
    *,
    dtype: str,
    device: str,
    page_size: int,
    compute_capability: tuple[int, int] | None,
    recurrent: bool = False,
) -> AttnNeeds:
    """The needs of a model of these facts, run with these settings: of its softmax layers, or of its recurrent ones.

    compute_capability: None where the device is no CUDA device.
    """
    return AttnNeeds(
        device=device,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=page_size,
        layers=tuple(layer for layer in facts.layers if (layer.recurrent is not None) == recurrent),
        compute_capability=compute_capability,
    )
