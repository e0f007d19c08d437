"""What a model asks of an attention backend, from its facts and the settings."""

from __future__ import annotations

import dataclasses

from enginery.config.resolve import DeviceFacts, Settings
from enginery.contracts.attention import AttnNeeds
from enginery.contracts.batch import Phase
from enginery.contracts.model import ModelFacts


def attn_needs(
    facts: ModelFacts, settings: Settings, device: DeviceFacts, *, recurrent: bool = False, verifies: bool = False
) -> AttnNeeds:
    """The needs of a model of these facts, run with these settings: of its softmax layers, or of its recurrent ones.

    verifies: whether steps verify drafts.
    """
    return AttnNeeds(
        device=device.kind,
        dtype=settings.dtype,
        kv_dtype=settings.dtype if recurrent else settings.kv_dtype,
        page_size=settings.page_size,
        layers=tuple(layer for layer in facts.layers if (layer.recurrent is not None) == recurrent),
        compute_capability=device.compute_capability,
        phases=frozenset({Phase.PREFILL, Phase.DECODE, Phase.MIXED, *((Phase.VERIFY,) if verifies else ())}),
    )


def by_phase(needs: AttnNeeds) -> dict[str, AttnNeeds]:
    """Of two backends, of which one prefills and the other decodes."""
    phases = {"prefill": {Phase.PREFILL}, "decode": {Phase.DECODE, Phase.VERIFY} & needs.phases}
    return {role: dataclasses.replace(needs, phases=frozenset(some)) for role, some in phases.items()}
