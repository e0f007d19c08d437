"""What kernels in Gluon use of Hopper's memory copies and barriers, for `gluon_by_interpreter`: a ring between two groups of warps.

The groups are threads here, of which one runs until it must wait at a barrier, or lets another go on by `arrive`. Barriers count
arrivals, expected bytes and phases as the hardware does. So a kernel that waits for the wrong phase, or gives up a slot that it
still reads, ends wrong or not at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from gluon_by_interpreter import Language, as_float32, as_number, multiplied

PATIENCE_S = 30
TURN = threading.Condition()
WAITING: list[Callable[[], bool]] = []
"""Of each group at a barrier, whether it may go on."""


class Blocks:
    """In place of `blocks_of`: of a matrix, copied in blocks of so many rows and columns, zeros behind its end."""

    def __init__(self, matrix: torch.Tensor, rows: int, columns: int) -> None:
        self.matrix, self.block_shape, self.layout = matrix, (rows, columns), None
        self.dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[matrix.dtype]

    def block(self, row: int, column: int) -> torch.Tensor:
        found = torch.zeros(self.block_shape)
        part = self.matrix[row : row + self.block_shape[0], column : column + self.block_shape[1]].float()
        found[: part.shape[0], : part.shape[1]] = part
        return found


class Slot:
    """A part of shared memory: not a number before anything is copied to it."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.values = torch.full(tuple(shape), float("nan"))

    def permute(self, order: tuple[int, ...]) -> SimpleNamespace:
        return SimpleNamespace(values=self.values.permute(order))


class Barrier:
    """Completes a phase when all have arrived and all bytes are there."""

    count = arrived = bytes = phase = 0

    def step(self) -> None:
        if self.arrived == self.count and self.bytes == 0:
            self.arrived, self.phase = 0, self.phase ^ 1
            TURN.notify_all()


class Ring:
    """What `allocate_shared_memory` gives, of several slots or barriers."""

    def __init__(self, element: tl.dtype, shape: list[int], _: object) -> None:
        self.shape = shape
        self.slots: list[Any] = [Barrier() if element == tl.int64 else Slot(shape[1:]) for _ in range(shape[0])]

    def index(self, slot: Any) -> Any:
        return self.slots[as_number(slot)]


class Barriers:
    """`mbarrier`."""

    MBarrierLayout = SimpleNamespace

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = count

    def expect(self, barrier: Barrier, num_bytes: int) -> None:
        barrier.bytes += num_bytes
        barrier.arrived += 1  # the bytes are not there yet

    def arrive(self, barrier: Barrier, count: int) -> None:
        barrier.arrived += count
        barrier.step()
        TURN.wait_for(lambda: not any(may_go_on() for may_go_on in WAITING))

    def wait(self, barrier: Barrier, phase: int) -> None:
        def is_over() -> bool:
            return barrier.phase != phase

        WAITING.append(is_over)
        TURN.notify_all()
        try:
            assert TURN.wait_for(is_over, PATIENCE_S), "nobody arrives"
        finally:
            WAITING.remove(is_over)


def copied(blocks: Blocks, at: Sequence[Any], barrier: Barrier, into: Slot) -> None:
    """`tma.async_copy_global_to_shared`: there at once."""
    into.values = blocks.block(*map(as_number, at))
    barrier.bytes -= into.values.numel() * blocks.matrix.element_size()
    barrier.step()


class HopperLanguage(Language):
    """`gl`, with groups of warps."""

    allocate_shared_memory = Ring
    int64 = tl.int64

    def warp_specialize(self, groups: Sequence[tuple[Callable[..., None], Sequence[Any]]], *_: object) -> None:
        failed: list[BaseException] = []

        def run(function: Callable[..., None], args: Sequence[Any]) -> None:
            with TURN:
                try:
                    function(*args)
                except BaseException as error:
                    failed.append(error)
                TURN.notify_all()

        threads = [threading.Thread(target=run, args=group) for group in groups]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if failed:
            raise failed[0]


def stand_ins(num_warps: int) -> dict[str, object]:
    """For `gluon_by_interpreter.interpreted`."""
    return {
        "gl": HopperLanguage(num_warps),
        "mbarrier": Barriers(),
        "tma": SimpleNamespace(async_copy_global_to_shared=copied),
        "warpgroup_mma": lambda a, b, acc, is_async: multiplied(as_float32(a.values.numpy()), as_float32(b.values.numpy()), acc),
        "warpgroup_mma_wait": lambda _, deps: deps[0],
        "fence_async_shared": lambda: None,
        "blocks_of": Blocks,
        "release_successor": lambda _: None,
        "wait_for_predecessor": lambda _: None,
    }
