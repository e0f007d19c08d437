"""The weight format that a checkpoint is stored in: chosen among plugins, and asked module by module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from enginery.checkpoint.files import PLAIN, StoredTensor
from enginery.checkpoint.folder import text_part
from enginery.checkpoint.formats import refuse_quantization
from enginery.contracts.ops import OpSpec
from enginery.contracts.weights import FormatNeeds, Scheme, StoredPart, StoredWeight, WeightFormat, WeightFormatSpec
from enginery.errors import CheckpointError, PluginError
from enginery.nn.reference_ops import REFERENCE_SCHEMES
from enginery.plugin.boundary import check_is, checked, inside
from enginery.plugin.records import Offer
from enginery.plugin.selection import ranked, refusals


def stated_quantization(config: Mapping[str, Any]) -> Mapping[str, object] | None:
    """`quantization_config` of config.json or of its text model, or what others call it; None for plain weights."""
    keys = ("quantization_config", "compression_config", "quantization")  # the second is of old compressed-tensors, the third MLX's
    stated = next((part[key] for part in (config, text_part(config)) for key in keys if part.get(key)), None)
    if not stated:
        return None
    if not isinstance(stated, Mapping):
        raise CheckpointError(f"config.json has quantization_config {stated!r}; served are plain weights, or an object of a format")
    return stated


def choose_format(
    stated: Mapping[str, object], offers: Sequence[Offer[WeightFormatSpec]], needs: FormatNeeds, *, absent: Sequence[str] = ()
) -> tuple[Offer[WeightFormatSpec], str]:
    """The format of highest priority that knows the `quant_method` and refuses nothing, and why it is that one.

    Raises `CheckpointError` with the reasons of those that refuse, the formats that there are, and plugins that are not live.
    """
    method = stated.get("quant_method")
    known = [offer for offer in ranked(offers) if method in offer.spec.methods]
    reasons = {offer.name: refusals(offer, needs) for offer in known}
    for offer in known:
        if not reasons[offer.name]:
            others = f", the highest priority of {len(known)} that do" if len(known) > 1 else ""
            return offer, f"reads quant_method {method!r}{others}"
    said = [f"{name}: {reason.text}" for name, many in reasons.items() for reason in many]
    names = [f"{offer.name} ({offer.spec.summary})" for offer in ranked(offers)]
    raise CheckpointError("\n".join([str(refuse_quantization(stated, names, said)), *absent]))


def kept_schemes(ops: Sequence[Offer[OpSpec]]) -> Mapping[str, frozenset[Scheme]]:
    """By operation, the schemes that its kernels take. ops: those chosen, the highest priority first."""
    kept = {}
    for operation in ("bind_linear", "bind_experts"):
        winner = next((offer.spec for offer in ops if operation in offer.spec.provides), None)
        kept[operation] = (REFERENCE_SCHEMES if winner is None else winner.schemes).get(operation, frozenset())
    return kept


@dataclass(frozen=True, eq=False)
class FormatReader:
    """A chosen format at work. stored: the checkpoint's tensors, of which plain ones are read as such; None for random weights."""

    offer: Offer[WeightFormatSpec]
    config: Mapping[str, object]
    weight_format: WeightFormat
    stored: Mapping[str, StoredTensor] | None
    _parts: dict[Scheme, Sequence[StoredPart]] = field(default_factory=dict)

    @classmethod
    def load(
        cls, offer: Offer[WeightFormatSpec], config: Mapping[str, object], stored: Mapping[str, StoredTensor] | None
    ) -> FormatReader:
        with inside(offer, f"load the weight format {offer.name!r}"):
            return cls(offer, config, checked(offer, offer.spec.load(), WeightFormat), stored)

    def scheme(self, module: str) -> Scheme | None:
        """How the module of that full name is stored; None: plain."""
        tensor = None if self.stored is None else self.stored.get(f"{module}.weight")
        if tensor is not None and tensor.dtype in PLAIN:
            return None
        with inside(self.offer, f"tell how {module} is stored"):
            scheme = self.offer.spec.reads(self.config, module)
        return None if scheme is None else check_is(self.offer, scheme, Scheme, by=f"reads of {module}")

    def parts(self, scheme: Scheme) -> Sequence[StoredPart]:
        if scheme not in self._parts:
            with inside(self.offer, f"name the tensors of weights in {scheme}"):
                self._parts[scheme] = tuple(self.weight_format.parts(scheme))
        return self._parts[scheme]

    def unpack(self, parts: Mapping[str, torch.Tensor], scheme: Scheme) -> StoredWeight:
        """Into the form that kernels take. Raises `PluginError` that names the plugin if it is none."""
        with inside(self.offer, f"unpack weights in {scheme}"):
            weight = self.weight_format.unpack(parts, scheme)
        if not isinstance(weight, StoredWeight) or weight.scheme != scheme:
            raise PluginError(f"{self.offer.source} unpacked weights in {scheme} to {weight!r}")
        return weight
