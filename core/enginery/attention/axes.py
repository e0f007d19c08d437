"""Padding and slicing of a batch, generated from what each of its fields states.

    tokens    [ request 0 ....... | request 1 | request 2 .. | padding ]        num_tokens
    requests  [ 0 | 1 | 2 | padding ]                                          num_requests

What is cut or padded is another batch, without a plan: plans are made last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import torch

from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import (
    READ,
    STATED,
    VIEWS,
    Axis,
    Fill,
    ForwardBatch,
    MemoryKind,
    Named,
    NamedTensor,
    Phase,
    Split,
    StateView,
    View,
    Whole,
    new_identity,
    with_fields,
)

AnyView = View | StateView
AnyCut = ForwardBatch | View | StateView
CutT = TypeVar("CutT", bound=AnyCut)
MaybeT = TypeVar("MaybeT", torch.Tensor, torch.Tensor | None)

_GROWING: Final = tuple((name, stated) for name, stated in STATED.items() if stated.axis in (Axis.TOKEN, Axis.REQUEST))
_KEPT: Final = tuple(name for name, stated in STATED.items() if stated.axis is Axis.NONE and stated.split is Split.SHARED)
_OPTIONAL: Final[Mapping[type, Sequence[tuple[str, Axis]]]] = {
    owner: tuple((name, each.axis) for name, each in stated.items() if each.fill is not None and name in vars(owner))
    for owner, stated in ((ForwardBatch, STATED), *VIEWS.items())
}  # those with a default
_OF_VIEW: Final = {view: tuple(stated.items()) for view, stated in VIEWS.items()}


def token_fields(batch: ForwardBatch) -> list[torch.Tensor]:
    """Each field with a row of one int64 per token, of views and named inputs too, in the order of `with_token_fields`."""
    return [values for _, values in _token_fields(batch)]


def with_token_fields(batch: ForwardBatch, fields: Iterator[torch.Tensor]) -> ForwardBatch:
    """The batch with these in place of its token fields. An iterator that gives more is read no further."""
    changed: dict[str, Any] = {}
    views: dict[MemoryKind, Any] = dict(batch.views)
    inputs = dict(batch.inputs)
    for (owner, name), _ in _token_fields(batch):
        if owner == "views":
            kind, _, field = name.partition(" ")
            views[kind] = with_fields(views[kind], **{field: next(fields)})
        elif owner == "inputs":
            inputs[name] = inputs[name]._replace(values=next(fields))
        else:
            changed[name] = next(fields)
    return renewed(batch, views=views, inputs=inputs, **changed)


def renewed(batch: ForwardBatch, **changes: object) -> ForwardBatch:
    """The batch with some fields changed, of as many tokens and requests; another batch, unplanned."""
    return with_fields(batch, identity=new_identity(), plan=None, **changes)


def _token_fields(batch: ForwardBatch) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    for name, stated in _GROWING:
        if stated.axis is Axis.TOKEN and (values := READ[name](batch)) is not None:
            yield ("", name), values
    for kind, view in batch.views.items():
        for name, stated in _OF_VIEW[type(view)]:
            if stated.axis is Axis.TOKEN and (values := READ[name](view)) is not None:
                yield ("views", f"{kind} {name}"), values
    for name, (values, named) in batch.inputs.items():
        if rides(named):
            yield ("inputs", name), values


def rides(named: NamedTensor) -> bool:
    """Whether it goes to the device with the other token fields: they are all of one shape and type."""
    return named.axis is Axis.TOKEN and named.dtype == "int64" and not named.dims


def narrowed(batch: ForwardBatch, views: Mapping[MemoryKind, AnyView]) -> ForwardBatch:
    """The batch with these of its views alone; another batch, unplanned."""
    whole = None if batch.whole is None else tuple.__new__(Whole, (batch, None, None))  # what is cut for one is there for all
    return renewed(batch, views=views, whole=whole)


class BatchPart(NamedTuple):
    """Requests of a batch and their rows in it. None: all."""

    rows: slice | None
    requests: slice | None
    batch: ForwardBatch


def cut_by_phase(batch: ForwardBatch, *, capture: bool = False) -> list[BatchPart]:
    """Of a mixed batch the requests at its front, which decode or verify, and the rest; of any other, or if it is captured, all."""
    if batch.phase is not Phase.MIXED or capture:
        return [BatchPart(None, None, batch)]
    count, first = batch.num_decode_requests, Phase.DECODE if batch.decode_len == 1 else Phase.VERIFY
    return cut_at(batch, count, count * batch.decode_len, (first, Phase.PREFILL))


def cut_at(batch: ForwardBatch, count: int, num_tokens: int, phases: tuple[Phase, Phase]) -> list[BatchPart]:
    """The first `count` requests, which have `num_tokens` tokens, and the rest, each in its phase; those that there are; unplanned.

    Tokens that only pad the batch go with the rest.
    """
    requests = (slice(0, count), slice(count, batch.num_requests))
    rows = (slice(0, num_tokens), slice(num_tokens, batch.num_tokens))
    each = zip(requests, rows, phases, strict=True)
    return [BatchPart(part, some, _sliced(batch, some, part, phase)) for some, part, phase in each if some.start < some.stop]


def _sliced(batch: ForwardBatch, requests: slice, rows: slice, phase: Phase) -> ForwardBatch:
    part = _part(batch, rows, requests)
    vars(part).update(
        {name: READ[name](batch) for name in _KEPT},
        phase=phase,
        trees=batch.trees and phase is not Phase.PREFILL,
        views={kind: _part(view, rows, requests) for kind, view in batch.views.items()},
        inputs=_split_named(batch.inputs, rows, requests) if batch.inputs else batch.inputs,
        outputs=_split_named(batch.outputs, rows, requests) if batch.outputs else batch.outputs,
        num_tokens=rows.stop - rows.start,
        num_requests=requests.stop - requests.start,
        identity=new_identity(),
        plan=None,
    )
    return part


def _part(whole: CutT, rows: slice, requests: slice) -> CutT:
    """The rows and requests of a batch or view, whose tensors are cut when they are read; but for optional ones, cut here."""
    part = object.__new__(type(whole))
    values = vars(part)
    for name, axis in _OPTIONAL[type(whole)]:
        if (tensor := READ[name](whole)) is not None:
            values[name] = tensor[rows if axis is Axis.TOKEN else requests]
    owner: AnyCut = whole
    # So that a part of a part is cut once. What was narrowed to some views may have lengths of its own.
    while (further := owner.whole) is not None and further.rows is not None and further.requests is not None:
        owner = further.owner
        rows = slice(further.rows.start + rows.start, further.rows.start + rows.stop)
        requests = slice(further.requests.start + requests.start, further.requests.start + requests.stop)
    values["whole"] = tuple.__new__(Whole, (owner, rows, requests))
    return part


def _split_named(tensors: Mapping[str, Named], rows: slice, requests: slice) -> dict[str, Named]:
    ranges = {Axis.TOKEN: rows, Axis.REQUEST: requests}
    found = {}
    for name, (values, stated) in tensors.items():
        if stated.split is not Split.DROPPED:
            found[name] = Named(values[ranges[stated.axis]] if stated.split is Split.CUT else values, stated)
    return found


def pad(batch: ForwardBatch, *, num_requests: int, num_tokens: int, geometry: KVGeometry) -> ForwardBatch:
    """The batch with more rows, which write to memory that nobody owns and whose results nobody reads; unplanned.

    With `decode_len` new tokens for each new request, each of those decodes so many (graphs of fixed batch size); otherwise the new
    requests are empty and the new tokens belong to none. Raises ValueError for fewer rows than there are.
    """
    more_requests, more_tokens = num_requests - batch.num_requests, num_tokens - batch.num_tokens
    if more_requests < 0 or more_tokens < 0:
        raise ValueError(
            f"{num_requests=} and {num_tokens=} are less than the {batch.num_requests} and {batch.num_tokens} there are"
        )
    if not more_requests and not more_tokens:
        return renewed(batch)
    length = batch.decode_len if more_tokens == more_requests * batch.decode_len else 0
    more = {Axis.TOKEN: more_tokens, Axis.REQUEST: more_requests}

    def grown(values: MaybeT, axis: Axis, fill: Fill | None, kind: MemoryKind = "") -> MaybeT:
        if values is None or fill is None or not (count := more.get(axis, 0)):
            return values
        value = _fill_value(fill, kind, length=length, geometry=geometry)
        return torch.constant_pad_nd(values, [0, 0] * (values.dim() - 1) + [0, count], value)

    def named(tensors: Mapping[str, Named]) -> dict[str, Named]:
        return {name: Named(grown(values, stated.axis, stated.fill), stated) for name, (values, stated) in tensors.items()}

    padded = renewed(
        batch,
        **{name: grown(READ[name](batch), stated.axis, stated.fill) for name, stated in _GROWING},
        views={
            kind: with_fields(view, **{key: grown(READ[key](view), it.axis, it.fill, kind) for key, it in _OF_VIEW[type(view)]})
            for kind, view in batch.views.items()
        },
        inputs=named(batch.inputs),
        outputs=named(batch.outputs),
        num_requests=num_requests,
        num_tokens=num_tokens,
        whole=None,
    )
    vars(padded).pop("num_decode_requests", None)  # as far as it was counted: of fewer requests
    return padded


def _fill_value(fill: Fill, kind: MemoryKind, *, length: int, geometry: KVGeometry) -> int:
    if fill is Fill.ZERO:
        return 0
    if fill is Fill.LENGTH:
        return length
    if fill is Fill.SCRATCH_SEAT:
        return geometry.num_seats
    page = geometry.scratch_page(kind)
    return page * geometry.page_size if fill is Fill.SCRATCH_SLOT else page
