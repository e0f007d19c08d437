"""Sums within norms and best tokens of ranks: they are processes in the interpreter, and streams on a GPU, which has all parts."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import compile_only
import pytest
import torch

from enginery.api import PeerMemory
from enginery_ops_triton.kernels import sums
from enginery_ops_triton.peer_ops import NUM_BYTES, Blocks, TritonPeerOps
from enginery_ops_triton.sent_rows import PART_BYTES, EarlyProduct, SentRows
from enginery_ops_triton.small_linear import Product
from enginery_ops_triton.spec import PEER_BYTES, SENT_BYTES

HERE = Path(__file__).parent
EPS = 1e-5
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 6e-2}
SIZES = [(1, 24), (3, 64), (60, 520), (1, 4096), (8, 4096), (9, 8192), (64, 4096), (64, 8192), (3, 5120)]


def test_the_stated_sizes_are_what_parts_have() -> None:
    assert (PEER_BYTES, SENT_BYTES) == (NUM_BYTES, PART_BYTES)


@pytest.mark.parametrize("which", [("2,1", "2,2", "early"), ("3,2", "4,1")], ids=["two", "more"])
def test_ranks_give_the_same_bits_and_what_float64_gives(which: tuple[str, ...]) -> None:
    """Few rows and more, of several types, in turns, over memory of processes that wait for each other; one is ended. The same of
    rows that leave early, with sums that nobody takes between them, and counts that overflow."""
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(HERE / "ranks_in_processes.py"), *which]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=170, check=False)
    assert done.stdout.splitlines() == [f"{each}: ranks agree" for each in which], done.stderr


class NoProduct(Product):
    """Whose numbers nobody looks at: to compute 64 M of them takes seconds."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(len(x), len(self.weight))

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        assert out.shape == (len(x), len(self.weight))


@pytest.mark.parametrize(
    ("rows", "columns", "num_ranks", "begins"),
    [
        (16384, 8192, 2, True),
        (8192, 4096, 2, True),
        (8191, 4096, 2, False),
        (16385, 8192, 2, False),
        (2048, 16392, 2, False),
        (16384, 4096, 4, False),
    ],
)
def test_many_rows_of_two_ranks_leave_early(rows: int, columns: int, num_ranks: int, *, begins: bool) -> None:
    """64 to 256 MiB, of rows of up to 32 KiB."""
    num_bytes = NUM_BYTES + PART_BYTES * (num_ranks == 2)
    memory = PeerMemory(rank=0, parts=tuple(torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(num_ranks)))
    weight = torch.zeros(columns, 1, dtype=torch.bfloat16)
    bound, product = TritonPeerOps(memory, dependent_launch=False), NoProduct(weight, None, {})
    early, x = bound.summed_early(product, columns), torch.zeros(rows, 1, dtype=torch.bfloat16)
    assert early(x).shape == (rows, columns)
    assert int(memory.parts[-1][4:8].view(torch.int32)) == (4 if begins else 0), "so many pieces have been sent"


def test_pieces_leave_when_they_are_computed_and_are_kept_until_the_last_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and events are noted: on a CPU there is one order of things."""
    noted, streams = list[str](), ["here"]

    class Event(str):
        def record(self) -> None:
            noted.append(f"{streams[-1]}: {self}")

    class Stream(str):
        def wait_event(self, event: Event) -> None:
            noted.append(f"{self} waits: {event}")

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(sums, "sum_norm_of_sent", defaultdict(lambda: lambda *given, **named: noted.append(f"{streams[-1]}: sum")))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("here"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    wrote = SimpleNamespace(stream_write_value32_=lambda flag, at, turn: noted.append(f"{streams[-1]}: flag {turn}"))
    monkeypatch.setattr(torch.ops, "symm_mem", wrote, raising=False)
    memory = PeerMemory(rank=0, parts=tuple(torch.zeros(64 + (2 << 16), dtype=torch.uint8) for _ in range(2)))
    sent = SentRows(memory, begin=64, dependent_launch=False, least_bytes=0, most_bytes=1 << 16)
    monkeypatch.setattr(sent, "_beside", Stream("beside"))
    monkeypatch.setattr(sent, "_computed", (*map(Event, ("computed 1", "computed 2", "computed 3", "computed 4")), Event("sent")))
    partial = EarlyProduct(Product(torch.ones(8, 4), None, {}), 8, sent)(torch.ones(512, 4))
    assert sent.add_rms_norm(partial, torch.zeros(512, 8), torch.ones(8), EPS) is not None
    pieces = [[f"here: computed {n}", f"beside waits: computed {n}", f"beside: flag {n}", "beside: sent"] for n in range(1, 5)]
    assert noted == [*itertools.chain(*pieces), "here: sum", "here waits: sent"]


def test_kernels_compile_for_hopper_without_a_gpu() -> None:
    compile_only.run(HERE / "hopper_peer_ops.py")


def test_what_is_taken_follows_from_sizes_and_types() -> None:
    """The same on all ranks: nothing else is looked at."""
    part = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    bound = {count: TritonPeerOps(PeerMemory(rank=0, parts=(part,) * count), dependent_launch=False) for count in (2, 4)}

    def takes(
        rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, *, residual: torch.dtype | None = None, of: int = 4
    ) -> bool:
        x, kept = torch.empty(rows, columns, dtype=dtype), torch.empty(rows, columns, dtype=residual or dtype)
        return bound[of].takes_sum(x, kept, torch.empty(columns, dtype=dtype))

    for ranks in (2, 4):
        assert takes(16384, 8192, of=ranks)
        assert takes(1, 8192, torch.float32, of=ranks)
        assert takes(1, 16384, of=ranks)
        assert not takes(1, 16392, of=ranks)
        assert not takes(1, 8196, torch.float32, of=ranks)
        assert not takes(0, 4096, of=ranks)
        assert not takes(600, 4100, of=ranks)  # rows that begin anywhere
    assert not takes(1, 4096, residual=torch.float32)
    assert not takes(1, 4096, torch.float64)
    assert bound[4].takes_best(torch.empty(1024, 8))
    assert bound[4].takes_best(torch.empty(1, 0))
    assert not bound[4].takes_best(torch.empty(1025, 8))
    assert not bound[4].takes_best(torch.empty(0, 8))
    assert not bound[4].takes_sum(torch.empty(4096, 4, dtype=torch.bfloat16).t(), torch.empty(4, 4096), torch.empty(4096))


class OneDevice:
    """Ranks of one process, each with a stream and a part on the same GPU. Kernels are loaded before any waits for another."""

    def __init__(self, num_ranks: int, blocks: Blocks | None = None) -> None:
        num_bytes = blocks.part_bytes if blocks else NUM_BYTES
        self.parts = tuple(torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(num_ranks))
        self.ranks = [
            TritonPeerOps(PeerMemory(rank=rank, parts=self.parts), dependent_launch=True, blocks=blocks)
            for rank in range(num_ranks)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(num_ranks)]

    def load(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        """A kernel that is loaded waits until the device has done all it was given, a kernel that waits for it included."""
        for part in self.parts:
            part[:4] = 1  # nobody waits
        x, weight = torch.zeros(rows, columns, dtype=dtype, device="cuda"), torch.ones(columns, dtype=dtype, device="cuda")
        torch.cuda.synchronize()
        for rank, stream in zip(self.ranks, self.streams, strict=True):
            with torch.cuda.stream(stream):  # which has memory for results then
                rank.add_rms_norm(x, x.clone(), weight, EPS)
        torch.cuda.synchronize()
        for part in self.parts:
            part.zero_()
        torch.cuda.synchronize()

    def run(self, partials: list[torch.Tensor], residuals: list[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
        """One turn of all ranks at once: their norms."""
        found = []
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                found.append(self.ranks[rank].add_rms_norm(partials[rank], residuals[rank], weight, EPS))
        return found


def compare_with_float64(device: OneDevice, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Three turns."""
    device.load(rows, columns, dtype)
    for turn in range(3):
        torch.manual_seed(turn)
        partials = [torch.randn(rows, columns, device="cuda").to(dtype) for _ in device.ranks]
        residual, weight = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((rows, columns), (columns,)))
        residuals = [residual.clone() for _ in device.ranks]
        torch.cuda.synchronize()
        normed = device.run(partials, residuals, weight)
        torch.cuda.synchronize()
        assert all(torch.equal(each, residuals[0]) for each in residuals)
        assert all(torch.equal(each, normed[0]) for each in normed)
        summed = residual.double() + sum(partial.double() for partial in partials)
        wanted = summed * (summed.square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * weight.double()
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(residuals[0].double(), summed, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(normed[0].double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_streams_of_a_gpu_give_what_float64_gives(num_ranks: int, dtype: torch.dtype) -> None:
    device = OneDevice(num_ranks, Blocks(most_programs=32, most_warps=8))  # so few that those of all ranks run at once
    for rows, columns in SIZES:
        if columns * dtype.itemsize <= 32 << 10:
            compare_with_float64(device, rows, columns, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_follow_each_other(num_ranks: int, ahead: int, dtype: torch.dtype) -> None:
    """More than there are places for, of several sizes after each other."""
    device = OneDevice(num_ranks, Blocks(most_programs=32, ahead=ahead, most_warps=8))
    for rows, columns in ((200, 8192), (1000, 4096), (3000, 1024), (33, 8192), (1200, 5120)):
        compare_with_float64(device, rows, columns, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 128_256), (5, 151_669), (32, 1000)])
def test_streams_of_a_gpu_find_the_best_of_all_columns(num_ranks: int, rows: int, vocab: int) -> None:
    """In graphs, again and again; one logit is NaN, and of two equal ones the first is found."""
    device, width = OneDevice(num_ranks), -(-vocab // num_ranks)
    for part in device.parts:
        part[:4] = 1  # nobody waits while kernels are loaded
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    graphs, found = [], []
    for rank, stream in enumerate(device.streams):
        own = logits[:, rank * width : (rank + 1) * width]
        with torch.cuda.stream(stream):
            device.ranks[rank].best(own, rank * width)
        torch.cuda.synchronize()
    for part in device.parts:
        part.zero_()
    for rank, stream in enumerate(device.streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found.append(device.ranks[rank].best(logits[:, rank * width : (rank + 1) * width], rank * width))
        graphs.append(graph)
    for replay in range(20):
        logits.copy_(torch.randn(rows, vocab, device="cuda"))
        logits[-1, vocab // 2] = torch.nan if replay % 2 else 100
        logits[-1, vocab - 1] = 100
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, device.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        wanted = (logits == logits.nan_to_num(torch.inf).amax(-1, keepdim=True)).int().argmax(-1)
        wanted[-1] = -1 if replay % 2 else vocab // 2
        assert all(torch.equal(each, wanted) for each in found), f"replay {replay}"


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_graphs_are_replayed_as_often_as_one_likes(num_ranks: int) -> None:
    """Sums of two sizes in one graph of each rank, so that places are taken in turn within it and from replay to replay."""
    dtype, columns = torch.bfloat16, 4096
    device = OneDevice(num_ranks, Blocks(most_programs=32, most_warps=8))
    for rows in (4, 64):
        device.load(rows, columns, dtype)
    weight = torch.ones(columns, dtype=dtype, device="cuda")
    x = {rows: [torch.randn(rows, columns, device="cuda").to(dtype) for _ in range(num_ranks)] for rows in (4, 64)}
    kept = {rows: [torch.zeros(rows, columns, device="cuda", dtype=dtype) for _ in range(num_ranks)] for rows in (4, 64)}
    graphs = []
    for rank, stream in enumerate(device.streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for rows in (4, 64, 4):
                device.ranks[rank].add_rms_norm(x[rows][rank], kept[rows][rank], weight, EPS)
        graphs.append(graph)
    for replay in range(20):
        for rows in (4, 64):
            for rank in range(num_ranks):
                kept[rows][rank].zero_()
                x[rows][rank].copy_(torch.randint(-4, 5, (rows, columns), device="cuda"))  # whose sums are exact
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, device.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for rows, times in ((4, 2), (64, 1)):
            total = sum(each.float() for each in x[rows]).to(dtype)
            wanted = (total.float() * times).to(dtype)
            assert all(torch.equal(each, wanted) for each in kept[rows]), f"replay {replay}, {rows} rows"


@pytest.mark.gpu
@pytest.mark.parametrize(("num_ranks", "rows"), [(2, 1), (4, 1), (4, 600)])
def test_a_kernel_that_waits_for_nobody_any_more_ends(num_ranks: int, rows: int) -> None:
    device = OneDevice(num_ranks, Blocks(most_programs=32))
    device.load(rows, 4096, torch.bfloat16)
    x, weight = torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda"), torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(device.streams[0]):
        device.ranks[0].add_rms_norm(x, x.clone(), weight, EPS)
        ended = torch.cuda.Event()
        ended.record()
    time.sleep(0.2)
    assert not ended.query(), "it waits for the other ranks"
    device.ranks[0].end()
    began_s = time.monotonic()
    while not ended.query():
        assert time.monotonic() - began_s < 10
        time.sleep(0.01)
