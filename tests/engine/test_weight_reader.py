"""Tensors are read as safetensors itself reads them, however they are cut, and a read that fails says where and leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from engine.pieces_made import piece
from safetensors import safe_open
from safetensors.torch import save_file

from enginery.checkpoint import reader as weight_reader
from enginery.checkpoint.files import scan_checkpoint
from enginery.checkpoint.reader import in_threads, taken
from enginery.errors import CheckpointError
from enginery.worker.weights.load import load
from enginery.worker.weights.store import Piece, Slice, WeightRecord

CPU = torch.device("cpu")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QKV = (["a.q", "a.k", "a.v"], [(24, 8), (7, 8), (7, 8)])
SINGLE = {"embed": (33, 8), "norm": (8,), "b.out": (8, 5), "empty": (0, 8)}


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shapes = {**dict(zip(*QKV, strict=True)), **SINGLE, "lm_head": (33, 8)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def write_shards(folder: Path, weights: dict[str, torch.Tensor], *, num_shards: int) -> None:
    names = sorted(weights)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        save_file({name: weights[name] for name in names[shard::num_shards]}, folder / file)
        weight_map |= dict.fromkeys(names[shard::num_shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def read_by_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    read = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as reader:
            read |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    return read


def recorded(dtype: torch.dtype) -> WeightRecord:
    """Of a model whose head is tied: it asks for all but lm_head."""
    record = WeightRecord(dtype)
    record.tensor(piece(*QKV, dtype))
    for name, shape in SINGLE.items():
        record.tensor(piece(name, shape, dtype))
    return record


def assert_loads_the_same(folder: Path, dtype: torch.dtype, device: torch.device = CPU) -> None:
    expected = read_by_safetensors(folder)
    loaded = load(recorded(dtype), scan_checkpoint(folder), device)
    merged = torch.cat([expected[name] for name in QKV[0]])
    assert torch.equal(loaded.tensor(piece(*QKV, dtype)).cpu(), merged.to(dtype))
    for name, shape in SINGLE.items():
        assert torch.equal(loaded.tensor(piece(name, shape, dtype)).cpu(), expected[name].to(dtype)), name


@pytest.fixture
def nothing_left() -> object:
    """No thread of a load, and no open file, outlives it."""
    files = len(os.listdir("/proc/self/fd"))
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("weights")] == []
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("span_bytes", [16, 64, 200, 1 << 20])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.usefixtures("nothing_left")
def test_loaded_tensors_are_those_of_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, wanted: torch.dtype, span_bytes: int
) -> None:
    monkeypatch.setattr(weight_reader, "SPAN_BYTES", span_bytes)
    write_shards(tmp_path, tensors(DTYPES[stored]), num_shards=3)
    assert_loads_the_same(tmp_path, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_may_differ_in_dtype_within_a_merged_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = tensors(torch.float32)
    weights |= {name: weights[name].to(torch.bfloat16) for name in ("a.k", "norm")}
    write_shards(tmp_path, weights, num_shards=2)
    assert_loads_the_same(tmp_path, dtype)


def test_a_tensor_may_begin_at_any_byte(tmp_path: Path) -> None:
    half, values = torch.randn(3).to(torch.bfloat16), torch.randn(5, 3)
    header = {
        "odd": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]},
        "half": {"dtype": "BF16", "shape": [3], "data_offsets": [3, 9]},
        "w": {"dtype": "F32", "shape": [5, 3], "data_offsets": [9, 69]},
    }
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + b"odd" + half.view(torch.uint8).numpy().tobytes() + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        record = WeightRecord(dtype)
        record.tensor(piece("half", (3,), dtype))
        record.tensor(piece("w", (5, 3), dtype))
        loaded = load(record, scan_checkpoint(tmp_path), CPU)
        assert torch.equal(loaded.tensor(piece("half", (3,), dtype)), half.to(dtype))
        assert torch.equal(loaded.tensor(piece("w", (5, 3), dtype)), values.to(dtype))


def test_of_rows_nobody_reads_those_of_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some columns the rows are read whole, as they do not adjoin in the file."""
    weights, num_read, preadv = {"w": torch.randn(12, 8)}, list[int](), os.preadv
    save_file(weights, tmp_path / "model.safetensors")
    monkeypatch.setattr(os, "preadv", lambda *given: num_read.append(preadv(*given)) or num_read[-1])
    for starts, shape, num_bytes in (((4, 0), (4, 8), 4 * 8 * 4), ((0, 2), (12, 3), 12 * 8 * 4)):
        part = Piece((Slice(name="w", whole=(12, 8), starts=starts, shape=shape),), torch.float32)
        (record := WeightRecord(torch.float32)).tensor(part)
        loaded = load(record, scan_checkpoint(tmp_path), CPU).tensor(part)
        assert torch.equal(loaded, weights["w"][starts[0] : starts[0] + shape[0], starts[1] : starts[1] + shape[1]])
        assert sum(num_read) == num_bytes
        num_read.clear()


def test_a_tensor_that_two_pieces_ask_for_is_read_into_both(tmp_path: Path) -> None:
    weights = tensors(torch.float32)
    save_file(weights, tmp_path / "model.safetensors")
    record = WeightRecord(torch.float32)
    record.tensor(piece("a.q", (24, 8), torch.float32))
    record.tensor(piece(*QKV, torch.float32))
    loaded = load(record, scan_checkpoint(tmp_path), CPU)
    assert torch.equal(loaded.tensor(piece(*QKV, torch.float32))[:24], weights["a.q"])
    assert torch.equal(loaded.tensor(piece("a.q", (24, 8), torch.float32)), weights["a.q"])


def test_a_header_whose_sizes_disagree_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [5, 3], "data_offsets": [0, 30]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(60))
    with pytest.raises(CheckpointError, match=r"model.safetensors has a damaged header: tensor 'w' is F32 \[5, 3\] in 30 bytes"):
        scan_checkpoint(tmp_path)


@pytest.mark.parametrize("entry", [{}, {"dtype": "F32", "shape": 3, "data_offsets": [0, 4]}, [1], None])
def test_a_header_without_what_a_tensor_needs_is_refused(tmp_path: Path, entry: object) -> None:
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(60))
    with pytest.raises(CheckpointError, match=r"damaged header \(.* at tensor 'w'\)"):
        scan_checkpoint(tmp_path)


def test_a_header_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    header = b"[" * 200_000
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="damaged header"):
        scan_checkpoint(tmp_path)


Read = Callable[[int, Sequence[memoryview], int], int]


def reading_at_most(num_bytes: int) -> Read:
    whole = os.preadv
    return lambda file, buffers, start: whole(file, [buffers[0][:num_bytes]], start)


def failing_with(code: int) -> Read:
    def read(file: int, buffers: Sequence[memoryview], start: int) -> int:
        raise OSError(code, os.strerror(code))

    return read


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("nothing_left")
def test_reads_that_bring_less_than_asked_for_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: torch.dtype
) -> None:
    write_shards(tmp_path, tensors(torch.float32), num_shards=2)
    monkeypatch.setattr(os, "preadv", reading_at_most(13))
    assert_loads_the_same(tmp_path, wanted)


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("nothing_left")
def test_a_file_that_becomes_shorter_is_named_with_the_tensor(tmp_path: Path, wanted: torch.dtype) -> None:
    save_file(tensors(torch.float32), tmp_path / "model.safetensors")
    stored = scan_checkpoint(tmp_path)
    os.truncate(tmp_path / "model.safetensors", stored["norm"].start + 5)
    later = [name for name in stored if stored[name].start >= stored["norm"].start]
    with pytest.raises(CheckpointError, match=rf"model.safetensors was cut off while it was read: .*'({'|'.join(later)})'"):
        load(recorded(wanted), stored, CPU)


@pytest.mark.usefixtures("nothing_left")
def test_a_file_that_is_gone_since_it_was_scanned_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, tensors(torch.float32), num_shards=2)
    stored = scan_checkpoint(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors cannot be opened: No such file"):
        load(recorded(torch.float32), stored, CPU)


@pytest.mark.usefixtures("nothing_left")
def test_an_error_of_the_disk_is_named_with_file_and_tensor_and_keeps_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(tensors(torch.float32), tmp_path / "model.safetensors")
    stored = scan_checkpoint(tmp_path)
    monkeypatch.setattr(os, "preadv", failing_with(errno.EIO))
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read, at tensor '.+': Input/output error") as error:
        load(recorded(torch.float32), stored, CPU)
    assert isinstance(error.value.__cause__, OSError)


@pytest.mark.usefixtures("nothing_left")
def test_a_failure_in_one_thread_stops_the_others() -> None:
    waiting, done = deque(range(1000)), []
    both_run = threading.Barrier(2, timeout=40)

    def work() -> None:
        both_run.wait()
        for item in taken(waiting):
            if item == 0:
                raise ValueError("broken")
            done.append(item)
            while 0 < len(waiting) <= 500:
                pass  # the other half is only given up

    with pytest.raises(ValueError, match="broken"):
        in_threads(work, waiting, num_threads=2)
    assert len(done) < 501


def test_how_far_the_reading_is_gets_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_reader, "SPAN_BYTES", 64)
    monkeypatch.setattr(weight_reader, "TELL_S", 0.001)
    weights = tensors(torch.float32)
    write_shards(tmp_path, weights, num_shards=2)
    told, tellers = [], set()

    def tell(done: int, total: int) -> None:
        told.append((done, total))
        tellers.add(threading.current_thread())

    load(recorded(torch.float32), scan_checkpoint(tmp_path), CPU, tell=tell)
    total = sum(tensor.nbytes for name, tensor in weights.items() if name != "lm_head")
    assert told[-1] == (total, total)
    assert told == sorted(told)
    assert tellers == {threading.current_thread()}, "what sends it on belongs to one thread"
