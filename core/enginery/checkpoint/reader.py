"""Tensors out of safetensors files into their places in memory, by several threads.

    file      [ .. q | k | v | o .. ]      split into spans that fit the staging memory, read in the order of the file
    thread    preadv into its piece of the staging memory, then a copy to the device on the one side stream
    device    [ q ; k ; v ]                allocated once, as the model wants it

`preadv` instead of a mapping of the file: it takes no page faults, runs beside other Python threads, and reports an I/O error or a
file that became shorter, for which a mapping has only SIGBUS. On a CPU it reads straight into the tensors; only values of another
dtype are staged. Nothing is held twice, and the staging memory is gone afterwards.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from io import FileIO
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from enginery.checkpoint.files import READABLE, StoredTensor
from enginery.errors import CheckpointError

ItemT = TypeVar("ItemT")
SPAN_BYTES: Final = 8 << 20
MAX_THREADS: Final = 8  # they read 43 GB/s out of the page cache, which is what the way to one device takes
ALIGNMENT: Final = 8  # in the staging memory: of the widest dtype
TELL_S: Final = 0.25  # between two words about how far it is


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Adjoining values of a stored tensor, from byte `start` of its file. target: [values], on the device in the model's dtype."""

    name: str
    stored: StoredTensor
    start: int
    target: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return READABLE[self.stored.dtype]

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes in the file."""
        return self.target.numel() * self.dtype.itemsize


Span = Sequence[Part]  # of one file; together they fit SPAN_BYTES
Tell = Callable[[int, int], None]  # bytes that are read, of so many


def read_tensors(
    targets: Iterable[tuple[str, torch.Tensor]],
    stored: Mapping[str, StoredTensor],
    device: torch.device,
    *,
    tell: Tell | None = None,
) -> None:
    """Fill each target, contiguous and on `device`, with the tensor of that name. Done on return, and no thread is left.

    tell: called by this thread, every `TELL_S` seconds. Raises `CheckpointError` with the file and the tensor that cannot be read.
    """
    by_file: dict[Path, list[tuple[str, torch.Tensor]]] = {}
    for name, target in targets:
        by_file.setdefault(stored[name].file, []).append((name, target))
    # Of all files in turn: each is read from its beginning to its end, and several at once.
    turns = zip_longest(*(_spans_of(named, stored) for named in by_file.values()))
    spans = deque(span for span in chain.from_iterable(turns) if span is not None)
    num_threads = min(len(spans), _num_threads(spans, device))
    num_spans, total_bytes = len(spans), sum(part.num_bytes for span in spans for part in span)

    def say() -> None:
        if tell is not None:
            tell(total_bytes * (num_spans - len(spans)) // num_spans, total_bytes)

    with ExitStack() as opened:
        files = {file: opened.enter_context(_open(file)).fileno() for file in by_file}
        staging = opened.enter_context(_staging(num_threads * SPAN_BYTES, device))
        stream = opened.enter_context(_side_stream(device))
        pieces = [staging[start : start + SPAN_BYTES] for start in range(0, len(staging), SPAN_BYTES)]
        in_threads(
            lambda: _read_spans(spans, files, staging=pieces.pop(), stream=stream), spans, num_threads=num_threads, meanwhile=say
        )


def _open(file: Path) -> FileIO:
    try:
        return FileIO(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be opened: {error.strerror}") from error


def in_threads(
    work: Callable[[], None], waiting: deque[ItemT], *, num_threads: int, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Run `work`, which takes from `waiting` until nothing is left, in so many threads. A failure empties it and is raised.

    meanwhile: called by this thread, every `TELL_S` seconds.
    """
    if not waiting:
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as pool:
        try:
            working = {pool.submit(work) for _ in range(num_threads)}
            while working:
                done, working = wait(working, TELL_S, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                meanwhile()
        finally:
            waiting.clear()


def taken(waiting: deque[ItemT]) -> Iterator[ItemT]:
    """What is waiting, one by one, for a thread that shares it with others."""
    while True:
        try:
            item = waiting.popleft()
        except IndexError:
            return
        yield item


def _spans_of(named: Iterable[tuple[str, torch.Tensor]], stored: Mapping[str, StoredTensor]) -> Iterator[Span]:
    span: list[Part] = []
    room = SPAN_BYTES
    in_order = sorted(named, key=lambda one: stored[one[0]].start)
    for part in (part for name, target in in_order for part in _parts(name, stored[name], target)):
        size = -(-part.num_bytes // ALIGNMENT) * ALIGNMENT
        if size > room:
            yield span
            span, room = [], SPAN_BYTES
        span.append(part)
        room -= size
    if span:
        yield span


def _parts(name: str, stored: StoredTensor, target: torch.Tensor) -> Iterator[Part]:
    itemsize, values = READABLE[stored.dtype].itemsize, target.view(-1)
    for start in range(0, len(values), SPAN_BYTES // itemsize):
        piece = values[start : start + SPAN_BYTES // itemsize]
        yield Part(name=name, stored=stored, start=stored.start + start * itemsize, target=piece)


def _num_threads(spans: Iterable[Span], device: torch.device) -> int:
    """A conversion on the host uses all its cores: then one thread reads while another converts."""
    converts = any(part.dtype != part.target.dtype for span in spans for part in span)
    return 2 if converts and device.type == "cpu" else min(os.cpu_count() or 1, MAX_THREADS)


@contextmanager
def _staging(num_bytes: int, device: torch.device) -> Iterator[torch.Tensor]:
    """[num_bytes] uint8 on the host, from which `device` copies by itself. torch's own pinned memory would never be given back."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if device.type != "cuda" or num_bytes == 0:
        yield memory
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    try:
        yield memory
    finally:
        torch.cuda.check_error(runtime.cudaHostUnregister(memory.data_ptr()))


@contextmanager
def _side_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """None on a CPU. Starts after what the device was doing, is done at the end, and keeps no memory of conversions."""
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        yield stream
    finally:
        stream.synchronize()
        torch.cuda.empty_cache()


def _read_spans(spans: deque[Span], files: Mapping[Path, int], *, staging: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
    """A thread's work. staging: [SPAN_BYTES] uint8, its own."""
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        for span in taken(spans):
            used = 0
            for part in span:
                staged = staging[used : used + part.num_bytes]
                _read_part(part, files[part.stored.file], staged)
                used += -(-part.num_bytes // ALIGNMENT) * ALIGNMENT
            if stream is not None:
                stream.record_event().synchronize()  # then the staging memory may be written again


def _read_part(part: Part, file: int, staged: torch.Tensor) -> None:
    target = part.target
    if target.device.type == "cpu" and part.dtype == target.dtype:
        _fill(target.view(torch.uint8), part, file)
        return
    _fill(staged, part, file)
    values = staged.view(part.dtype)
    if part.dtype != target.dtype:
        values = values.to(target.device, non_blocking=True)  # converted there
    target.copy_(values, non_blocking=True)


def _fill(buffer: torch.Tensor, part: Part, file: int) -> None:
    """buffer: [part.num_bytes] uint8 on the host."""
    view = buffer.numpy().data
    done = 0
    while done < part.num_bytes:
        try:
            count = os.preadv(file, [view[done:]], part.start + done)
        except OSError as error:
            raise CheckpointError(f"{part.stored.file} cannot be read, at tensor {part.name!r}: {error.strerror}") from error
        if count == 0:
            raise CheckpointError(
                f"{part.stored.file} was cut off while it was read: it ends at byte {part.start + done:,}, in tensor "
                f"{part.name!r}; fetch it again"
            )
        done += count
