"""Part of the kit for model families: tensor ranks, with whole experts too, lanes and stages compute what one rank does."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from enginery.checkpoint.files import READABLE, scan_checkpoint, unstack
from enginery.checkpoint.reader import read_tensors
from enginery.contracts.model import ModelSpec
from enginery.contracts.weights import FormatNeeds, WeightFormatSpec
from enginery.errors import Unsupported
from enginery.nn.reference_ops import REFERENCE_SCHEMES
from enginery.plugin.registry import Registry
from enginery.testing.kits.ranks import RankAnswer, RankThreads
from enginery.testing.kits.weights import WholeTensors
from enginery.testing.rules import BrokenRule, Fault, SkippedCheck
from enginery.worker.weights.formats import FormatReader, choose_format, stated_quantization
from enginery.worker.weights.needed_weights import is_of_expert, needed_weights
from enginery.worker.weights.store import Slice

WORST: Final = 1.25  # of one rank's distance from float64


def tensors_asked_for(
    family: ModelSpec, config: Mapping[str, Any], reader: FormatReader | None, *, names: Collection[str] = ()
) -> dict[str, Slice]:
    """Every tensor of the checkpoint that a single rank takes something of, by its name. names: of all that it has."""
    record = needed_weights(family, config, torch.float32, reader=reader, kept=REFERENCE_SCHEMES, names=names)
    return {source.name: source for piece in record.pieces for part in piece.slices for source in part.sources}


class FolderModel:
    """A checkpoint folder's family with its weights, whole and in memory. Raises `SkippedCheck` where there are none."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        if not list(folder.glob("*.safetensors")):
            raise SkippedCheck("the folder has no weights, of which ranks could have their parts")
        registry = Registry.load()
        self._config, self.family, self._reader = config, registry.find_model(config)[0].spec, None
        stored = unstack(scan_checkpoint(folder), self.family.stacked_weights)
        if (stated := stated_quantization(config)) is not None:
            needs = FormatNeeds(config=stated, device="cpu", dtype="float32")
            self._reader = FormatReader.load(choose_format(stated, registry.offers(WeightFormatSpec), needs)[0], stated, stored)
        asked = tensors_asked_for(self.family, config, self._reader, names=stored.keys())
        self.tensors = {name: torch.empty(part.whole, dtype=READABLE[stored[name].dtype]) for name, part in asked.items()}
        read_tensors(self.tensors.items(), stored, torch.device("cpu"))

    @property
    def repeated(self) -> int:
        """So many tensor ranks that two have the same KV heads, of which a layer has several; 0 where there is no such number."""
        layers = [layer for layer in self.family.describe(self._config).layers if layer.recurrent is None and layer.latent is None]
        sizes = {2 * layer.num_kv_heads for layer in layers if layer.num_kv_heads > 1}
        return min((size for size in sizes if not any(layer.num_heads % size for layer in layers)), default=0)

    def run(
        self, ids: Sequence[int], dtype: torch.dtype, *, beside: Sequence[Sequence[int]] = (), **ranks: int
    ) -> list[RankAnswer]:
        """By rank. beside: of other lanes. ranks: fields of `RankThreads`. Raises `SkippedCheck` for what these cannot share."""
        tensors = WholeTensors(self.tensors, dtype, self._reader)
        threads = RankThreads(family=self.family, config=self._config, tensors=tensors, **ranks)  # type: ignore[arg-type]  # of bool
        try:
            return threads.run(ids, beside=beside)
        except Unsupported as error:
            raise SkippedCheck(str(error)) from error


def tensor_ranks(folder: Path, config: Mapping[str, object], ids: Sequence[int]) -> str | None:
    """Several ranks are as close to float64 as one, and have the same bits: two, with whole experts too, and two to each KV head.

    Raises `BrokenRule`. Returns why the last cannot share the model, if so.
    """
    model = FolderModel(folder, config)
    (truth,), (one,) = model.run(ids, torch.float64), model.run(ids, torch.float32)
    _compare("2 ranks", model.run(ids, torch.float32, tensor_size=2), one, truth)
    if any(map(is_of_expert, model.tensors)):
        _compare("2 ranks with whole experts", model.run(ids, torch.float32, tensor_size=2, cuts_experts=True), one, truth)
    if not model.repeated:
        return None
    try:
        several = model.run(ids, torch.float32, tensor_size=model.repeated)
    except SkippedCheck as skipped:
        return str(skipped)
    _compare(f"{model.repeated} ranks", several, one, truth)
    return None


def lanes(folder: Path, config: Mapping[str, object], ids: Sequence[int]) -> None:
    """Two, of a sequence each, are as close to float64 as one rank is, where the family says that it runs in them."""
    model, other = FolderModel(folder, config), ids[::-1]
    if not model.family.lanes:
        raise SkippedCheck("the family does not say that it runs in lanes")
    for own, answer in zip((ids, other), model.run(ids, torch.float32, beside=[other]), strict=True):
        _compare("2 lanes", [answer], *model.run(own, torch.float32), *model.run(own, torch.float64))


def _compare(what: str, several: Sequence[RankAnswer], one: RankAnswer, truth: RankAnswer) -> None:
    exact = truth.logits
    own, theirs = (float((found.logits - exact).norm() / exact.norm()) for found in (one, several[0]))
    if not theirs <= WORST * own + 1e-6:
        raise BrokenRule(f"{what} are {theirs:.1e} from float64, one rank {own:.1e}", Fault.NUMBERS)
    if not all(torch.equal(several[0].hidden, other.hidden) for other in several):
        raise BrokenRule(f"hidden states of {what} differ: something is not summed, or summed twice", Fault.NUMBERS)


def pipeline_stages(folder: Path, config: Mapping[str, object], ids: Sequence[int]) -> None:
    """Two stages are one bit for bit. Raises `BrokenRule`."""
    model = FolderModel(folder, config)
    (one,), (two,) = model.run(ids, torch.float32), model.run(ids, torch.float32, num_stages=2)
    if not torch.equal(one.logits, two.logits):
        raise BrokenRule("two pipeline stages compute other bits than one: more crosses than is handed over", Fault.NUMBERS)
