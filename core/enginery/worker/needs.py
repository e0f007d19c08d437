"""What a model asks of an attention backend, from its facts and the settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from enginery.config.resolve import DeviceFacts, Settings
from enginery.contracts.attention import AttnLayerFacts, AttnNeeds
from enginery.contracts.batch import DECODING, Phase


class LayerNeeds(NamedTuple):
    """Of a model's layers: of those with softmax, and of the recurrent ones."""

    softmax: AttnNeeds
    recurrent: AttnNeeds

    @classmethod
    def of(cls, layers: Sequence[AttnLayerFacts], settings: Settings, device: DeviceFacts) -> LayerNeeds:
        """layers: with the heads that a backend is given."""
        softmax = AttnNeeds(
            device=device.kind,
            dtype=settings.dtype,
            kv_dtype=settings.kv_dtype,
            page_size=settings.page_size,
            layers=tuple(layer for layer in layers if layer.recurrent is None),
            compute_capability=device.compute_capability,
        )
        recurrent = tuple(layer for layer in layers if layer.recurrent is not None)
        return cls(softmax, dataclasses.replace(softmax, kv_dtype=settings.dtype, layers=recurrent))


def verifying(needs: AttnNeeds, *, trees: bool = False, device_lengths: bool = False) -> AttnNeeds:
    """The same where steps verify drafts too. trees: which may branch. device_lengths: a draft model decodes with these backends,
    by lengths that the device alone knows."""
    return dataclasses.replace(needs, phases=needs.phases | {Phase.VERIFY}, trees=trees, device_lengths=device_lengths)


def by_phase(needs: AttnNeeds) -> dict[str, AttnNeeds]:
    """Of backends of which one prefills and another decodes, and of a third, for decoding steps of one request."""
    prefill = dataclasses.replace(needs, phases=frozenset({Phase.PREFILL}), trees=False, device_lengths=False)
    decode = dataclasses.replace(needs, phases=needs.phases & DECODING)
    return {"prefill": prefill, "decode": decode, "single": dataclasses.replace(decode, single=True)}
