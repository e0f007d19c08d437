"""Padding, slicing and splitting follow from what each field states."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass

import pytest
import torch
from core.attention.batches import Planner, make_batch
from hypothesis import given
from hypothesis import strategies as st

from enginery.attention.axes import cut_at, pad, renewed, token_fields, with_token_fields
from enginery.attention.layer_kinds import of_kind
from enginery.attention.relay import BackendRelay
from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import (
    FULL,
    STATE,
    STATED,
    VIEWS,
    WINDOW,
    Axis,
    Fill,
    ForwardBatch,
    Named,
    NamedTensor,
    Split,
    View,
    along,
    stated_fields,
)

GEOMETRY = KVGeometry(pages={FULL: 9, STATE: 7}, page_size=16, layers=(), dtype="float32", num_seats=5)
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=6)
GROWING = (Axis.TOKEN, Axis.REQUEST)


def parts(batch: ForwardBatch, first: int) -> list[ForwardBatch]:
    """The first so many requests, and the rest."""
    num_tokens = int(batch.q_lens_cpu[:first].sum())
    return [cut.batch for cut in cut_at(batch, first, num_tokens, (batch.phase, batch.phase))]


def tensors(batch: ForwardBatch) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the batch that grows, by name, and of its views."""
    for owner, stated in ((batch, STATED), *((view, VIEWS[type(view)]) for view in batch.views.values())):
        for name, each in stated.items():
            if each.axis in GROWING and (value := getattr(owner, name)) is not None:
                yield f"{type(owner).__name__}.{name}", value


def test_a_field_without_an_axis_fails_where_the_batch_is_defined() -> None:
    forgetful = make_dataclass(
        "Forgetful", [("new_field", int, field(default=0))], bases=(ForwardBatch,), kw_only=True, frozen=True
    )
    with pytest.raises(TypeError, match=r"Forgetful\.new_field states no axis"):
        stated_fields(forgetful)


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        (field(metadata={"axis": Axis.TOKEN, "fill": Fill.ZERO}), "does not state how it is split"),
        (along(Axis.TOKEN), "what grows states what padding fills in"),
        (along(Axis.NONE), "cannot be cut"),
        (along(Axis.NONE, fill=Fill.ZERO, split=Split.SHARED), "others nothing"),
    ],
)
def test_a_field_that_states_less_than_axis_fill_and_split_fails_where_the_batch_is_defined(stated: object, said: str) -> None:
    """Hole 10: a new TOKEN field was padded with 0, a real slot, and a NONE field was lost."""
    with pytest.raises(TypeError, match=said):
        stated_fields(make_dataclass("Forgetful", [("new_field", object, stated)]))


def test_a_new_field_is_cut_like_the_others() -> None:
    @dataclass(kw_only=True, eq=False)
    class Extended:
        token_field: object = along(Axis.TOKEN, fill=Fill.SCRATCH_SLOT)
        request_field: object = along(Axis.REQUEST, fill=Fill.ZERO)

    assert {name: stated.axis for name, stated in stated_fields(Extended).items()} == {
        "token_field": Axis.TOKEN,
        "request_field": Axis.REQUEST,
    }


def test_a_batch_is_frozen_and_a_changed_copy_is_another_batch() -> None:
    batch = make_batch([1, 2])
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.kv_lens_cpu = batch.q_lens_cpu  # type: ignore[misc]
    copies = [dataclasses.replace(batch), *parts(batch, 1), of_kind(batch, FULL)]
    copies.append(pad(batch, num_requests=2, num_tokens=3, geometry=GEOMETRY))
    assert len({batch.identity, *(copy.identity for copy in copies)}) == 1 + len(copies)
    assert len(dataclasses.fields(ForwardBatch)) <= 18


@given(LENGTHS, st.data())
def test_parts_put_together_are_the_whole(q_lens: list[int], data: st.DataObject) -> None:
    batch = make_batch(q_lens)
    first = data.draw(st.integers(0, len(q_lens)))
    cut = parts(batch, first)
    for (name, whole), *cuts in zip(tensors(batch), *map(tensors, cut), strict=True):
        assert torch.equal(torch.cat([value for _, value in cuts]), whole), name
    for part in cut:
        assert part.num_tokens == int(part.q_lens_cpu.sum())


@given(LENGTHS, st.integers(0, 3), st.integers(0, 7))
def test_padding_keeps_every_real_row_and_sends_the_others_to_the_scratch_page(q_lens: list[int], more: int, tokens: int) -> None:
    batch = make_batch(q_lens)
    padded = pad(batch, num_requests=batch.num_requests + more, num_tokens=batch.num_tokens + tokens, geometry=GEOMETRY)
    assert (padded.num_requests, padded.num_tokens) == (batch.num_requests + more, batch.num_tokens + tokens)
    real = cut_at(padded, batch.num_requests, batch.num_tokens, (batch.phase, batch.phase))[0].batch
    for (name, mine), (_, theirs) in zip(tensors(real), tensors(batch), strict=True):
        assert torch.equal(mine, theirs), name
    assert set(padded.pages.slots[batch.num_tokens :].tolist()) <= {9 * 16}
    assert set(padded.page_table_cpu[batch.num_requests :].flatten().tolist()) <= {9}
    assert set(padded.states.reads_cpu[batch.num_requests :].tolist()) <= {7}
    assert set(padded.states.writes_cpu[batch.num_requests :].tolist()) <= {7}
    assert set(padded.seats_cpu[batch.num_requests :].tolist()) <= {5}
    assert set(padded.kv_lens_cpu[batch.num_requests :].tolist()) <= {1 if more == tokens else 0}


def test_padding_of_a_verification_has_as_many_rows_as_its_requests() -> None:
    batch = dataclasses.replace(make_batch([3, 3]), decode_len=3)
    assert batch.num_decode_requests == 2
    padded = pad(batch, num_requests=4, num_tokens=12, geometry=GEOMETRY)
    assert padded.q_lens_cpu.tolist() == [3] * 4
    assert padded.decode_len == 3


def test_what_is_none_stays_none_and_what_does_not_grow_is_kept_or_dropped_as_it_states() -> None:
    """Hole 10: an optional field left None crashed, and one that does not grow was dropped by pad and split."""
    plain, rows = make_batch([1, 2]), torch.tensor([0, 2])
    for batch in (plain, dataclasses.replace(plain, logits_rows=rows, kv_lens=torch.tensor([4, 5]), decode_len=2)):
        padded = pad(batch, num_requests=3, num_tokens=5, geometry=GEOMETRY)
        (part, _) = parts(batch, 1)
        assert padded.logits_rows is batch.logits_rows
        assert part.logits_rows is None
        assert (padded.decode_len, part.decode_len) == (batch.decode_len,) * 2
        assert (padded.kv_lens is None, part.kv_lens is None) == (batch.kv_lens is None,) * 2
        assert padded.pages.starts_cpu is None


def test_named_inputs_are_padded_and_split_as_they_state() -> None:
    rows = NamedTensor(name="rows", dims=(), dtype="int64", axis=Axis.TOKEN, fill=Fill.SCRATCH_SLOT)
    table = NamedTensor(name="table", dims=(2,), dtype="float32", axis=Axis.NONE, fill=Fill.ZERO, split=Split.SHARED)
    gone = NamedTensor(name="gone", dims=(), dtype="int64", axis=Axis.REQUEST, fill=Fill.ZERO, split=Split.DROPPED)
    inputs = {
        "rows": Named(torch.tensor([4, 5, 6]), rows),
        "table": Named(torch.ones(2), table),
        "gone": Named(torch.tensor([1, 2]), gone),
    }
    batch = dataclasses.replace(make_batch([1, 2]), inputs=inputs)
    part, padded = parts(batch, 1)[1], pad(batch, num_requests=2, num_tokens=4, geometry=GEOMETRY)
    assert {name: named.values.tolist() for name, named in part.inputs.items()} == {"rows": [5, 6], "table": [1.0, 1.0]}
    assert padded.inputs["rows"].values.tolist()[:3] == [4, 5, 6]
    assert padded.inputs["table"].values is inputs["table"].values
    fields = token_fields(batch)
    assert len(fields) == 4
    again = with_token_fields(batch, iter([values + 1 for values in fields]))
    assert again.inputs["rows"].values.tolist() == [5, 6, 7]
    assert torch.equal(again.pages.slots, batch.pages.slots + 1)


def test_a_leaf_is_given_the_one_view_of_its_memory() -> None:
    batch = make_batch([1, 2])
    assert of_kind(batch, FULL).views.keys() == {FULL}
    assert of_kind(batch, STATE).views.keys() == {STATE}
    with pytest.raises(ValueError, match="0 views of type View"):
        _ = of_kind(batch, STATE).page_table_cpu


def test_parts_of_what_is_cut_and_then_narrowed_to_a_window_have_its_shorter_lengths() -> None:
    """As under micro-batches, where decoding and prompts have backends of their own."""
    batch = make_batch([1, 1, 4, 3])
    starts = torch.tensor([0, 16, 16, 0], dtype=torch.int32)
    window = View(slots=batch.pages.slots, page_table_cpu=batch.page_table_cpu, starts_cpu=starts)
    _, second = parts(renewed(batch, kv_lens_cpu=torch.tensor([5, 21, 37, 3], dtype=torch.int32), views={WINDOW: window}), 1)
    cut = [part.kv_lens_cpu.tolist() for part in parts(of_kind(second, WINDOW), 1)]
    assert cut == [[5], [21, 3]]


def test_a_batch_cannot_shrink_by_padding() -> None:
    batch = make_batch([1, 2])
    with pytest.raises(ValueError, match="num_requests=1"):
        pad(batch, num_requests=1, num_tokens=3, geometry=GEOMETRY)


def test_what_is_cut_or_padded_is_unplanned() -> None:
    relay = BackendRelay(Planner(), "a test")
    batch = relay.plan(make_batch([1, 1, 2]))
    changed = [*parts(batch, 1), pad(batch, num_requests=4, num_tokens=5, geometry=GEOMETRY)]
    assert [other.plan for other in changed] == [None] * 3
    assert batch.plan is not None


def test_lengths_of_a_window_count_what_is_held_on_the_device_too() -> None:
    batch = make_batch([1, 1])
    window = View(slots=batch.pages.slots, page_table_cpu=batch.page_table_cpu, starts_cpu=torch.tensor([3, 1], dtype=torch.int32))
    held = of_kind(renewed(batch, views={**batch.views, WINDOW: window}, kv_lens=batch.kv_lens_cpu + 0), WINDOW)
    assert held.kv_lens is not None
    assert held.kv_lens.tolist() == held.kv_lens_cpu.tolist() == [1, 3]
