"""Weights reach a CUDA device by several threads, and nothing is held twice."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from engine.pieces_made import piece
from engine.test_weight_reader import DTYPES, assert_loads_the_same, tensors, write_shards
from safetensors.torch import save_file

from enginery.checkpoint import reader as weight_reader
from enginery.checkpoint.files import scan_checkpoint
from enginery.worker.weights.load import load
from enginery.worker.weights.store import WeightRecord

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("span_bytes", [64, 200, 1 << 20])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", DTYPES)
def test_loaded_tensors_are_those_of_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, wanted: torch.dtype, span_bytes: int
) -> None:
    monkeypatch.setattr(weight_reader, "SPAN_BYTES", span_bytes)
    write_shards(tmp_path, tensors(DTYPES[stored]), num_shards=3)
    assert_loads_the_same(tmp_path, wanted, torch.device("cuda"))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_the_device_holds_the_weights_and_what_is_being_converted(tmp_path: Path, stored: torch.dtype) -> None:
    device = torch.device("cuda")
    weights = {f"w{index}": torch.randn(8192, 4096).to(stored) for index in range(8)}
    save_file(weights, tmp_path / "model.safetensors")
    record = WeightRecord(torch.bfloat16)
    for name, weight in weights.items():
        record.tensor(piece(name, weight.shape, torch.bfloat16))
    gc.collect()  # engines of other tests
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    loaded = load(record, scan_checkpoint(tmp_path), device)
    converting = 0 if stored == torch.bfloat16 else weight_reader.MAX_THREADS * weight_reader.SPAN_BYTES
    assert torch.cuda.max_memory_allocated() - before <= record.num_bytes() + converting
    assert torch.cuda.memory_allocated() - before == record.num_bytes()
    assert torch.cuda.memory_reserved() - reserved <= record.num_bytes() + (16 << 20)
    for name, weight in weights.items():
        assert torch.equal(loaded.tensor(piece(name, weight.shape, torch.bfloat16)), weight.to(torch.bfloat16).to(device))
