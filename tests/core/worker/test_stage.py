"""Which layers a rank builds, with which ids and how many heads; and what a product may state."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from enginery.contracts.attention import AttnLayerFacts, GlobalLayerId, LatentFacts, LocalLayerId
from enginery.contracts.memory import RecurrentFacts
from enginery.contracts.model import ModelFacts
from enginery.contracts.parallel import Channel, Cut, ParallelFacts
from enginery.contracts.weights import LinearShape, RowOrder
from enginery.errors import Unsupported
from enginery.worker.weights.shares import rank_layer, share, stage_of

ATTENTION = AttnLayerFacts(num_heads=8, num_kv_heads=2, head_dim=16)
RULE = RecurrentFacts(rule="linear", decay="head", key_heads=8, value_heads=8, key_dim=16, value_dim=16)
RECURRENT = AttnLayerFacts(num_heads=8, num_kv_heads=8, head_dim=16, recurrent=RULE)
LATENT = AttnLayerFacts(
    num_heads=8, num_kv_heads=1, head_dim=40, latent=LatentFacts(rank=32, rope_dim=8, nope_dim=16, value_dim=12)
)


def facts_of(*layers: tuple[AttnLayerFacts, int], **changes: object) -> ModelFacts:
    placed = tuple(dataclasses.replace(layer, decoder_layer=index) for layer, index in layers)
    usual = dict(vocab_size=8, hidden_size=8, max_positions=64, activation_width=8, boundary=(Channel(name="x", width=8),))
    return ModelFacts(layers=placed, **usual | changes)


# Two layers with memory in decoder layer 0 (Falcon-H1), none in 1 and 3 (an MLP of Nemotron-H).
ODD = facts_of((RECURRENT, 0), (ATTENTION, 0), (ATTENTION, 2), num_decoder_layers=4)


def test_ids_count_layers_that_have_memory_and_not_decoder_layers() -> None:
    first, second = (stage_of(ODD, ParallelFacts(stage=stage, num_stages=2)) for stage in (0, 1))
    assert (first.layers, second.layers) == (range(2), range(2, 4))
    assert [(spec.global_id, spec.local_id) for spec in first.specs(0, scale=1.0)] == [(0, 0), (1, 1)]
    (spec,) = second.specs(2, scale=0.5)
    assert (spec.global_id, spec.local_id, spec.scale) == (2, 0, 0.5)
    assert (type(spec.global_id), type(spec.local_id)) == (GlobalLayerId, LocalLayerId)
    assert first.specs(1, scale=1.0) == second.specs(3, scale=1.0) == ()
    assert (first.is_first, first.is_last, second.is_first, second.is_last) == (True, False, False, True)


@pytest.mark.parametrize(("decoder_layer", "count"), [(0, 2), (1, 0)])
def test_one_spec_is_not_made_of_two_or_none(decoder_layer: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"decoder layer {decoder_layer} has {count} layers with memory"):
        stage_of(ODD, ParallelFacts()).spec(decoder_layer, scale=1.0)


def test_layers_of_equal_facts_are_equal_wherever_they_are() -> None:
    """Backends plan once for each kind of layer."""
    assert len({dataclasses.replace(ATTENTION, decoder_layer=index) for index in range(4)}) == 1


@pytest.mark.parametrize(
    ("layers", "changes", "said"),
    [
        (((ATTENTION, 1), (ATTENTION, 0)), {}, "in the order in which they run; their decoder layers are [1, 0]"),
        (((ATTENTION, 3),), {"num_decoder_layers": 3}, "a layer is in decoder layer 3, and num_decoder_layers is 3"),
    ],
)
def test_layers_that_contradict_each_other_are_named(
    layers: tuple[tuple[AttnLayerFacts, int], ...], changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        facts_of(*layers, **changes)


@pytest.mark.parametrize(
    ("layer", "ranks", "heads"), [(ATTENTION, 2, (4, 1)), (ATTENTION, 8, (1, 1)), (RECURRENT, 4, (2, 2)), (LATENT, 4, (2, 1))]
)
def test_a_rank_has_its_heads(layer: AttnLayerFacts, ranks: int, heads: tuple[int, int]) -> None:
    mine = rank_layer(layer, ParallelFacts(tensor_size=ranks))
    assert (mine.num_heads, mine.num_kv_heads) == heads


@pytest.mark.parametrize(
    ("rule", "ranks", "heads"),
    [
        ({"ssm": True, "key_heads": 2}, 2, (1, 4)),
        ({"ssm": True, "key_heads": 2}, 8, (1, 1)),  # four ranks have the same B and C
        ({"rule": "conv", "key_heads": 1, "value_heads": 96}, 4, (1, 24)),
        ({"rule": "scan", "key_heads": 1, "value_heads": 96}, 4, (1, 24)),
        ({"rule": "delta", "key_heads": 4}, 4, (1, 2)),
    ],
)
def test_a_rank_has_its_heads_of_a_recurrence_and_their_keys(rule: dict[str, Any], ranks: int, heads: tuple[int, int]) -> None:
    mine = rank_layer(dataclasses.replace(RECURRENT, recurrent=dataclasses.replace(RULE, **rule)), ParallelFacts(tensor_size=ranks))
    assert mine.recurrent is not None
    assert (mine.recurrent.key_heads, mine.recurrent.value_heads) == heads
    assert mine.num_heads == mine.num_kv_heads == heads[0]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"rule": "delta", "key_heads": 2}, "key heads: 2, which 4 ranks cannot share; 2 ranks can"),
        ({"ssm": True, "key_heads": 3, "value_heads": 12}, "key heads: 3, which 4 ranks cannot share"),
        (
            {"ssm": True, "key_heads": 1, "value_heads": 6},
            "value heads: 6, which 4 ranks cannot share; 2 ranks can",
        ),
    ],
)
def test_heads_of_a_recurrence_that_ranks_cannot_share_are_refused(rule: dict[str, Any], said: str) -> None:
    layer = dataclasses.replace(RECURRENT, recurrent=dataclasses.replace(RULE, **rule))
    with pytest.raises(Unsupported, match=said):
        rank_layer(layer, ParallelFacts(tensor_size=4))


@pytest.mark.parametrize(("size", "unit", "ranks"), [(2880, 32, 8), (96, 32, 2), (96, 32, 3), (128, 32, 4)])
def test_blocks_that_do_not_divide_are_shared_unevenly(size: int, unit: int, ranks: int) -> None:
    parts = [
        share(size, unit=unit, parallel=ParallelFacts(tensor_rank=rank, tensor_size=ranks), what="x", uneven=True)
        for rank in range(ranks)
    ]
    assert [start for start, _ in parts] == [sum(length for _, length in parts[:rank]) for rank in range(ranks)]
    assert sum(length for _, length in parts) == size
    lengths = {length for _, length in parts}
    assert max(lengths) - min(lengths) <= unit
    assert all(length % unit == 0 for length in lengths)


def test_a_family_without_a_boundary_has_one_stage() -> None:
    whole = facts_of((ATTENTION, 0), (ATTENTION, 1), boundary=())
    assert stage_of(whole, ParallelFacts()).layers == range(2)
    why = r"family 'odd' cannot be cut into 2 pipeline stages, its ModelFacts\.boundary is empty: leave --pp out"
    with pytest.raises(Unsupported, match=why):
        stage_of(whole, ParallelFacts(num_stages=2), family="family 'odd'")
    with pytest.raises(Unsupported, match="3 pipeline stages cannot share 2 decoder layers; --pp may be 2 at the most"):
        stage_of(facts_of((ATTENTION, 0), (ATTENTION, 1)), ParallelFacts(num_stages=3))


def test_a_product_has_a_value_for_all_parts_or_one_for_each() -> None:
    shape = LinearShape(names=("q", "k"), rows=(8, 4), columns=6, cut=(Cut.ROWS, Cut.NONE), unit=4, bias=(True, False))
    assert [(part.name, part.rows, part.cut, part.unit, part.bias) for part in shape.parts] == [
        ("q", 8, Cut.ROWS, 4, True),
        ("k", 4, Cut.NONE, 4, False),
    ]
    packed = LinearShape(names=("both",), rows=(8, 4), columns=6)
    assert [(part.name, part.first_row, part.packed_rows) for part in packed.parts] == [("both", 0, 12), ("both", 8, 12)]
    beside = LinearShape(names=("alone", "both", "both"), rows=(2, 8, 4), columns=6)
    assert [(part.name, part.first_row, part.packed_rows) for part in beside.parts] == [
        ("alone", 0, 2),
        ("both", 0, 12),
        ("both", 8, 12),
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"names": ("a", "b", "c")}, "one name, or one for each of its parts"),
        ({"unit": (1, 2, 3)}, "unit must be one value, or one for each part"),
        ({"factor": (1.0,)}, "factor must be one value, or one for each part"),
        ({"cut": (Cut.COLUMNS, Cut.NONE)}, "all cut by columns or none is"),
    ],
)
def test_a_product_that_contradicts_itself_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LinearShape(**{"names": ("a", "b"), "rows": (4, 4), "columns": 6, **changes})


def test_pairs_of_neighbours_come_apart_within_each_group_of_rows() -> None:
    assert RowOrder.split_pairs(6, first=0, count=4).places == (0, 2, 1, 3, 4, 5)
    assert RowOrder.split_pairs(6, first=2, count=4).places == (0, 1, 2, 4, 3, 5)
