"""How tokens get into a step: those of the host in one upload, those that the step before samples from where it left them.

    host      input_ids   [ 17 |  0 |  0 | 5 | 9 ]                0: not known yet
              sources     [ -1 |  6 | 16 | -1| -1]                places in `tokens`, by the seats of their requests
    device    tokens      [ .. 42 g1 (seat 3) .. 7 g1 (seat 8) ]  written by the step before: what it sampled, and guesses
              input_ids   [ 17 | 42 |  7 | 5 | 9 ]

So a step can be built and launched before the tokens of the one before have come back to the host, and before its guesses are made.
The inputs and outputs that only one model family or plugin knows have a buffer each, where graphs find it in every step:

    buffer    [ this step's rows ........ | not of this step ]      as long as the largest step

One-dimensional int64 inputs along tokens need none: they go to the device in one piece with the other token fields.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch

from enginery.attention.axes import renewed, rides, token_fields, with_token_fields
from enginery.contracts.batch import Axis, ForwardBatch, Named, NamedTensor
from enginery.contracts.step import StepInput
from enginery.errors import Unsupported
from enginery.kv.upload import pinned, to_device
from enginery.worker.layout import KNOWN, has_pending, token_sources


class NamedTensors:
    """Of one model. Most have none, and their batches pass through."""

    def __init__(
        self,
        inputs: Sequence[NamedTensor],
        outputs: Sequence[NamedTensor],
        *,
        max_tokens: int,
        max_requests: int,
        device: torch.device,
    ) -> None:
        names = [each.name for each in (*inputs, *outputs)]
        if len(set(names)) < len(names):
            raise ValueError(f"they need names of their own, and these are {', '.join(names)}")
        self._longest = {Axis.TOKEN: max_tokens, Axis.REQUEST: max_requests}
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.buffers: Mapping[str, torch.Tensor] = {
            each.name: torch.zeros(self._shape(each), dtype=_dtype(each), device=device)
            for each in (*inputs, *outputs)
            if each in outputs or not rides(each)
        }

    def with_inputs(self, batch: ForwardBatch, told: Mapping[str, bytes] = MappingProxyType({})) -> ForwardBatch:
        """A batch that has every input, where its token fields are. Unpadded, if the step tells any.

        told: by name, the values of the step's rows one after the other, little-endian (`StepInput.inputs`). Those that it says
        nothing of are zeros. Raises `Unsupported` for a name that the model has not got, and for another number of bytes.
        """
        if unknown := told.keys() - {each.name for each in self.inputs}:
            raise Unsupported(f"a step has the inputs {', '.join(sorted(unknown))}, which the model has not got")
        if not self.inputs:
            return batch
        made = {each.name: Named(self._read(each, batch, told.get(each.name, b"")), each) for each in self.inputs}
        return dataclasses.replace(batch, inputs=made)

    def _read(self, named: NamedTensor, batch: ForwardBatch, told: bytes) -> torch.Tensor:
        shape = self._shape(named, {Axis.TOKEN: batch.num_tokens, Axis.REQUEST: batch.num_requests})
        dtype, device = _dtype(named), batch.input_ids.device
        if not told:
            return torch.zeros(shape, dtype=dtype, device=device)
        if len(told) != (wanted := math.prod(shape) * dtype.itemsize):
            raise Unsupported(f"a step has {len(told)} bytes of the input {named.name}; {dtype} {list(shape)} has {wanted}")
        return torch.frombuffer(bytearray(told), dtype=dtype).view(shape)

    def placed(self, batch: ForwardBatch, *, leaves: Collection[str] = ()) -> ForwardBatch:
        """The batch with its inputs copied to where they stay, and its outputs there, but for those it leaves out; unplanned."""
        if not self.buffers:
            return batch
        inputs = dict(batch.inputs)
        for name, (values, stated) in batch.inputs.items():
            if name in self.buffers:
                place = self._rows(stated, batch)
                place.copy_(pinned(values, place.device) if values.device.type == "cpu" else values, non_blocking=True)
                inputs[name] = Named(place, stated)
        outputs = {each.name: Named(self._rows(each, batch), each) for each in self.outputs if each.name not in leaves}
        return renewed(batch, inputs=inputs, outputs=outputs)

    def _rows(self, named: NamedTensor, batch: ForwardBatch) -> torch.Tensor:
        buffer = self.buffers[named.name]
        if named.axis is Axis.NONE:
            return buffer
        return buffer[: batch.num_tokens if named.axis is Axis.TOKEN else batch.num_requests]

    def _shape(self, named: NamedTensor, sizes: Mapping[Axis, int] | None = None) -> tuple[int, ...]:
        return named.dims if named.axis is Axis.NONE else ((sizes or self._longest)[named.axis], *named.dims)


def _dtype(named: NamedTensor) -> torch.dtype:
    dtype: object = vars(torch).get(named.dtype)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{named.name} has dtype {named.dtype!r}, which is no dtype of torch")
    return dtype


class TokenFeed:
    """Owns the last token of each running request on the device, and the guesses at the next: [num_seats + 1, 1 + D] int64.

    The `scratch_seat` is for padding. wrong: [num_seats + 1] int64, device, of the guesses that a step verified last.
    named: where the inputs and outputs are that only the model knows. most_drafts: D.
    """

    def __init__(self, num_seats: int, device: torch.device, *, named: NamedTensors, most_drafts: int) -> None:
        self.device = device
        self._on_host = device.type == "cpu"
        self.named = named
        self.scratch_seat = num_seats
        self.width = 1 + most_drafts
        self.tokens = torch.zeros(num_seats + 1, self.width, dtype=torch.int64, device=device)
        self.wrong = torch.zeros(num_seats + 1, dtype=torch.int64, device=device)

    def upload(self, step: StepInput, batch: ForwardBatch, *, logits_rows: torch.Tensor | None) -> ForwardBatch:
        """The batch that the step was laid out as, padded or not, with its token fields on the device, complete."""
        batch, pending = self.named.with_inputs(batch, step.inputs), has_pending(step)
        if not self._on_host:
            sources = token_sources(step, width=self.width, size=batch.num_tokens)
            packed = to_device(torch.stack([*token_fields(batch), sources]), self.device)  # [fields + 1, T]
            batch, sources = with_token_fields(batch, iter(packed)), packed[-1]
        elif pending:
            sources = token_sources(step, width=self.width, size=batch.num_tokens)
        ids = batch.input_ids
        if pending:
            ids = torch.empty_like(ids)
            self.fill(batch.input_ids, sources, out=ids)
        return self.named.placed(renewed(batch, input_ids=ids, logits_rows=logits_rows))

    def overwrite(self, packed: torch.Tensor, fields: Sequence[torch.Tensor]) -> None:
        """Copy what a step has for each token, [T] int64 each on the host, over what graphs read: [fields, T]."""
        if self._on_host:
            torch.stack(tuple(fields), out=packed)
        else:
            packed.copy_(pinned(torch.stack(tuple(fields)), self.device), non_blocking=True)

    def fill(self, input_ids: torch.Tensor, sources: torch.Tensor, *, out: torch.Tensor) -> None:
        """[T] int64 each: a pending token from its place, to `out`, which may be `input_ids`. Device work only."""
        torch.where(sources == KNOWN, input_ids, self.tokens.view(-1)[sources.clamp(min=0)], out=out)

    def keep(self, sampled: torch.Tensor, seats: torch.Tensor) -> None:
        """Remember what was sampled, [S] int64, at `seats`, [S] int64. Device work only."""
        self.tokens[:, 0].index_copy_(0, seats, sampled)

    def keep_drafts(self, drafts: torch.Tensor, seats: torch.Tensor) -> None:
        """Remember guesses at what follows, [S, d] int64, at `seats`, [S] int64. Device work only."""
        self.tokens[:, 1 : 1 + drafts.shape[1]].index_copy_(0, seats, drafts)
