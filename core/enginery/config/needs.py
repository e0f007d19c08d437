"""What a model asks of an attention backend."""

from __future__ import annotations

from typing import Final

from enginery.contracts.attention import AttnNeeds
from enginery.contracts.batch import Phase
from enginery.contracts.model import ModelFacts

SOFTMAX_PHASES: Final = frozenset({Phase.PREFILL, Phase.DECODE, Phase.MIXED})


def attn_needs(
    facts: ModelFacts,
    *,
    dtype: str,
    device: str,
    page_size: int,
    compute_capability: tuple[int, int] | None,
    recurrent: bool = False,
    phases: frozenset[Phase] = SOFTMAX_PHASES,
) -> AttnNeeds:
    """The needs of a model of these facts, run with these settings: of its softmax layers, or of its recurrent ones.

    compute_capability: None where the device is no CUDA device. phases: those that the backend will be given.
    """
    return AttnNeeds(
        device=device,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=page_size,
        layers=tuple(layer for layer in facts.layers if (layer.recurrent is not None) == recurrent),
        phases=phases,
        compute_capability=compute_capability,
    )
