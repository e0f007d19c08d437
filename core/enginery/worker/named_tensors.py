"""The inputs and outputs that only one model family or plugin knows: one buffer for each, where graphs find it in every step.

    buffer    [ this step's rows ........ | not of this step ]      as long as the largest step

One-dimensional int64 inputs along tokens need none: they go to the device in one piece with the other token fields.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch

from enginery.attention.axes import renewed, rides
from enginery.contracts.batch import Axis, ForwardBatch, Named, NamedTensor
from enginery.errors import Unsupported
from enginery.kv.upload import pinned


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
            raise Unsupported(f"a model's inputs and outputs need names of their own, and it has {', '.join(names)}")
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
        along = sizes or self._longest
        return named.dims if named.axis is Axis.NONE else (along[named.axis], *named.dims)


def _dtype(named: NamedTensor) -> torch.dtype:
    dtype: object = vars(torch).get(named.dtype)
    if not isinstance(dtype, torch.dtype):
        raise Unsupported(f"{named.name} has dtype {named.dtype!r}, which is no dtype of torch")
    return dtype
