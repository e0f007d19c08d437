"""Part of the kit for model families: several tensor ranks, and two pipeline stages, compute what one rank does."""

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
from enginery.worker.weights.needed_weights import needed_weights
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
        self._config, self._family, self._reader = config, registry.find_model(config)[0].spec, None
        stored = unstack(scan_checkpoint(folder), self._family.stacked_weights)
        if (stated := stated_quantization(config)) is not None:
            needs = FormatNeeds(config=stated, device="cpu", dtype="float32")
            self._reader = FormatReader.load(choose_format(stated, registry.offers(WeightFormatSpec), needs)[0], stated, stored)
        asked = tensors_asked_for(self._family, config, self._reader, names=stored.keys())
        self._tensors = {name: torch.empty(part.whole, dtype=READABLE[stored[name].dtype]) for name, part in asked.items()}
        read_tensors(self._tensors.items(), stored, torch.device("cpu"))

    @property
    def repeated(self) -> int:
        """So many tensor ranks that two have the same KV heads, of which a layer has several; 0 where there is no such number."""
        layers = [layer for layer in self._family.describe(self._config).layers if layer.recurrent is None and layer.latent is None]
        sizes = {2 * layer.num_kv_heads for layer in layers if layer.num_kv_heads > 1}
        return min((size for size in sizes if not any(layer.num_heads % size for layer in layers)), default=0)

    def run(
        self,
        ids: Sequence[int],
        dtype: torch.dtype,
        *,
        tensor_size: int = 1,
        num_stages: int = 1,
        cuts_experts: bool = False,
    ) -> list[RankAnswer]:
        """By rank. Raises `SkippedCheck` for sizes that the ranks cannot share."""
        threads = RankThreads(
            family=self._family,
            config=self._config,
            tensors=WholeTensors(self._tensors, dtype, self._reader),
            tensor_size=tensor_size,
            num_stages=num_stages,
            cuts_experts=cuts_experts,
        )
        try:
            return threads.run(ids)
        except Unsupported as error:
            raise SkippedCheck(str(error)) from error


def tensor_ranks(folder: Path, config: Mapping[str, Any], ids: Sequence[int]) -> str | None:
    """Several ranks are as close to float64 as one, and have the same bits: two, and two to each KV head. Raises `BrokenRule`.

    Returns why the latter cannot share the model, if so.
    """
    model = FolderModel(folder, config)
    (truth,), (one,) = model.run(ids, torch.float64), model.run(ids, torch.float32)
    _compare_ranks(model.run(ids, torch.float32, tensor_size=2), one.logits, truth.logits)
    if not model.repeated:
        return None
    try:
        several = model.run(ids, torch.float32, tensor_size=model.repeated)
    except SkippedCheck as skipped:
        return str(skipped)
    _compare_ranks(several, one.logits, truth.logits)
    return None


def _compare_ranks(several: Sequence[RankAnswer], one: torch.Tensor, truth: torch.Tensor) -> None:
    own, theirs = (float((logits - truth).norm() / truth.norm()) for logits in (one, several[0].logits))
    if not theirs <= WORST * own + 1e-6:
        raise BrokenRule(f"{len(several)} ranks are {theirs:.1e} from float64, one rank {own:.1e}", Fault.NUMBERS)
    if not all(torch.equal(several[0].hidden, other.hidden) for other in several):
        raise BrokenRule(f"hidden states of {len(several)} ranks differ: something is not summed, or summed twice", Fault.NUMBERS)


def pipeline_stages(folder: Path, config: Mapping[str, Any], ids: Sequence[int]) -> None:
    """Two stages are one bit for bit. Raises `BrokenRule`."""
    model = FolderModel(folder, config)
    (one,), (two,) = model.run(ids, torch.float32), model.run(ids, torch.float32, num_stages=2)
    if not torch.equal(one.logits, two.logits):
        raise BrokenRule("two pipeline stages compute other bits than one: more crosses than is handed over", Fault.NUMBERS)
