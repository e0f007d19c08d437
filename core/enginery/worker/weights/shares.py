"""Which part of a model a rank has: of a tensor's axis, of a layer's heads, of the layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from enginery.contracts.attention import AttnLayerFacts
from enginery.contracts.model import ModelFacts, StageLayers
from enginery.contracts.parallel import ParallelFacts
from enginery.errors import Unsupported

Range = tuple[int, int]  # start, length
_ASKED: Final = (2, 4, 8, 16, 32)  # ranks


def share(size: int, *, unit: int, parallel: ParallelFacts, what: str, repeats: bool = False, uneven: bool = False) -> Range:
    """This rank's part of an axis of `size`, in multiples of `unit`. Raises `Unsupported` with the numbers of ranks that would do.

    repeats: where there are fewer units than ranks, several ranks may have the same one. uneven: some ranks may have a unit more.
    """
    ranks, rank = parallel.tensor_size, parallel.tensor_rank
    units, rest = divmod(size, unit)
    if ranks == 1:
        return 0, size
    able = [each for each in (ranks, *_ASKED) if not rest and (each <= units if uneven else units % each == 0)]
    if ranks in able:
        start = rank * units // ranks
        return start * unit, ((rank + 1) * units // ranks - start) * unit
    if not rest and repeats and ranks % units == 0:
        return rank * units // ranks * unit, unit
    raise _unshared(size, unit, ranks, what=what, able=able)


def _unshared(size: int, unit: int, ranks: int, *, what: str, able: Sequence[int]) -> Unsupported:
    able = able or [each for each in range(3, size // unit + 1) if size % (each * unit) == 0][:1]
    that_do = f"{' or '.join(map(str, able))} ranks can" if able else "it is not for several ranks"
    units = f" in units of {unit}" if unit > 1 else ""
    return Unsupported(f"{what}: {size}{units}, which {ranks} ranks cannot share; {that_do}")


def rank_layer(layer: AttnLayerFacts, parallel: ParallelFacts) -> AttnLayerFacts:
    """The layer with the heads of this rank. Raises `Unsupported` for heads that the ranks cannot share."""
    if parallel.tensor_size == 1:
        return layer
    if (rule := layer.recurrent) is not None:
        _, values = share(rule.value_heads, unit=1, parallel=parallel, what="a recurrent layer's value heads")
        shared = rule.ssm or rule.rule in ("conv", "scan")  # heads of a group have one key, as KV heads; or there is none
        _, keys = share(rule.key_heads, unit=1, parallel=parallel, what="a recurrent layer's key heads", repeats=shared)
        rule = dataclasses.replace(rule, key_heads=keys, value_heads=values)
        return dataclasses.replace(layer, num_heads=keys, num_kv_heads=keys, recurrent=rule)
    _, heads = share(layer.num_heads, unit=1, parallel=parallel, what="the attention's query heads")
    if layer.latent is not None:
        return dataclasses.replace(layer, num_heads=heads)  # each rank keeps whole latents
    _, kv_heads = share(layer.num_kv_heads, unit=1, parallel=parallel, what="the attention's KV heads", repeats=True)
    return dataclasses.replace(layer, num_heads=heads, num_kv_heads=kv_heads)


def stage_of(facts: ModelFacts, parallel: ParallelFacts, *, family: str = "the model's family") -> StageLayers:
    """This rank's layers: as `layers_by_stage` says, or evenly; then the first stages have one more where they do not divide.

    family: for the error. Raises `Unsupported` for more stages than layers, and for a family that does not say what crosses
    between stages.
    """
    count, stages, stage = facts.num_decoder_layers, parallel.num_stages, parallel.stage
    if stages > 1 and not facts.boundary:
        raise Unsupported(f"{family} cannot be cut into {stages} pipeline stages, its ModelFacts.boundary is empty: leave --pp out")
    if stages > max(count, 1):
        raise Unsupported(f"{stages} pipeline stages cannot share {count} decoder layers; --pp may be {count} at the most")
    sizes = parallel.layers_by_stage or [count // stages + (index < count % stages) for index in range(stages)]
    if (len(sizes), sum(sizes)) != (stages, count):
        told = ", ".join(map(str, sizes))
        raise Unsupported(f"--pp-layers gives {len(sizes)} stages of {told} layers; the model has {count}, and --pp is {stages}")
    first = sum(sizes[:stage])
    layers = range(first, first + sizes[stage])
    return StageLayers(
        layers=layers,
        memory=tuple(rank_layer(layer, parallel) for layer in facts.layers if layer.decoder_layer in layers),
        first_global_id=sum(layer.decoder_layer < first for layer in facts.layers),
        is_first=stage == 0,
        is_last=stage == stages - 1,
    )
