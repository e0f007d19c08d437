"""How many decoder layers each pipeline stage has: the stage that has most to do, or to hold, is to have as little as can be.

held       bytes of a layer's weights in memory, which a step of many requests reads too
token      numbers that one token is multiplied with: all of a layer's, of its experts those it chooses

The first layer's costs have the embedding, which is held, and not multiplied with; the last one's have the head.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from enginery.config.schema import Decision
from enginery.contracts.model import ModelFacts, ModelSpec
from enginery.contracts.parallel import ParallelFacts
from enginery.contracts.weights import Scheme, WeightFormatSpec
from enginery.plugin.boundary import inside
from enginery.plugin.records import Offer
from enginery.worker.weights.formats import FormatReader, stated_quantization
from enginery.worker.weights.needed_weights import expert_share, needed_weights, tensors_read


class LayerCost(NamedTuple):
    """Of one decoder layer, on a rank that has all of it. held: bytes. token: numbers."""

    held: int
    token: int


def divide_stages(
    parallel: ParallelFacts,
    family: Offer[ModelSpec],
    facts: ModelFacts,
    config: Mapping[str, object],
    dtype: torch.dtype,
    *,
    weight_format: Offer[WeightFormatSpec] | None,
    kept: Mapping[str, frozenset[Scheme]],
) -> tuple[ParallelFacts, tuple[Decision, ...]]:
    """With how many layers each stage has, if that was not asked for, and why. `stage_of` refuses what cannot be divided."""
    stages, reason = parallel.num_stages, "asked for"
    if stages == 1 or not facts.boundary or stages > facts.num_decoder_layers:
        return parallel, ()
    if not parallel.layers_by_stage:
        reader = None if weight_format is None else FormatReader.load(weight_format, stated_quantization(config) or {}, None)
        with inside(family, "build the model layer by layer"):
            costs = layer_costs(family.spec, config, dtype, reader=reader, kept=kept)
        with_memory = {layer.decoder_layer for layer in facts.layers}
        sizes = divide(costs, stages, [index in with_memory for index in range(len(costs))])
        if sizes is None:
            return parallel, ()
        parallel = dataclasses.replace(parallel, layers_by_stage=sizes)
        held, token = largest_shares(costs, sizes)
        most = f"at most {held:.0%} of the weights and {token:.0%} of what a token is multiplied with are on one stage"
        reason = f"{most}, which is the least; --pp-layers divides otherwise"
    value = f"{', '.join(map(str, parallel.layers_by_stage))} layers"
    return parallel, (Decision(setting="stages", value=value, reason=reason),)


def layer_costs(
    family: ModelSpec,
    config: Mapping[str, object],
    dtype: torch.dtype,
    *,
    reader: FormatReader | None = None,
    kept: Mapping[str, frozenset[Scheme]],
) -> list[LayerCost]:
    """Of each decoder layer, built alone, without memory."""
    facts = family.describe(config)
    count, costs = facts.num_decoder_layers, []
    for index in range(count):
        alone = ParallelFacts(stage=index, num_stages=count, layers_by_stage=(1,) * count)
        record = needed_weights(family, config, dtype, reader=reader, kept=kept, parallel=alone)
        read = list(tensors_read(record, facts, looks_up=index == 0))
        experts = {tensor.expert for tensor in read if tensor.expert is not None}
        share = expert_share(config, max(1, len(experts))) or 1.0
        token = sum(tensor.parameters * (1.0 if tensor.expert is None else share) for tensor in read)
        costs.append(LayerCost(record.num_bytes(), round(token)))
    return costs


def divide(costs: Sequence[LayerCost], num_stages: int, has_memory: Sequence[bool]) -> tuple[int, ...] | None:
    """How many layers each stage has. None: not every stage can have one with memory.

    What is least is the largest share of a stage, of all that is held or of what a token is multiplied with; then the sum of the
    shares' squares; then later stages have fewer layers. Exact: in whole numbers.
    """
    held = list(itertools.accumulate((cost.held + 1 for cost in costs), initial=0))  # of the first layers
    token = list(itertools.accumulate((cost.token + 1 for cost in costs), initial=0))
    memories = list(itertools.accumulate(has_memory, initial=0))

    def share(first: int, stop: int) -> int | None:
        if memories[first] == memories[stop]:
            return None
        return max((held[stop] - held[first]) * token[-1], (token[stop] - token[first]) * held[-1])

    most = _best(num_stages, len(costs), share, max)
    if most is None:
        return None

    def within(first: int, stop: int) -> int | None:
        own = share(first, stop)
        return None if own is None or own > most[0] else own

    found = _best(num_stages, len(costs), within, lambda before, own: before + own * own)
    assert found is not None, "what is within the least bound is a way to divide them"
    return found[1]


def _best(
    num_stages: int, count: int, cost: Callable[[int, int], int | None], join: Callable[[int, int], int]
) -> tuple[int, tuple[int, ...]] | None:
    """The least sum of as many stages' costs, by `join`, and the stages' sizes.

    cost: of layers from one on up to another; None: they are no stage.
    """
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for _ in range(num_stages):
        ahead: dict[int, tuple[int, tuple[int, ...]]] = {}
        for stop in range(1, count + 1):
            ways = [
                (join(before, own), -first, (*sizes, stop - first))
                for first, (before, sizes) in best.items()
                if first < stop and (own := cost(first, stop)) is not None
            ]
            if ways:
                value, _, sizes = min(ways)
                ahead[stop] = value, sizes
        best = ahead
    return best.get(count)


def largest_shares(costs: Sequence[LayerCost], sizes: Sequence[int]) -> tuple[float, float]:
    """Of the stages with so many layers each: of all that is held, and of what a token is multiplied with."""
    ends = list(itertools.accumulate(sizes))
    stages = [costs[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    held, token = (max(sum(cost[kind] for cost in stage) for stage in stages) for kind in (0, 1))
    return held / max(sum(cost.held for cost in costs), 1), token / max(sum(cost.token for cost in costs), 1)
