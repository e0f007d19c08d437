"""Weights that do not fit config.json, quantised in a way that it does not state or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from enginery.checkpoint.files import scan_checkpoint
from enginery.errors import CheckpointError
from enginery.worker.weights.store import Piece, Slice, WeightRecord, check


@pytest.mark.parametrize(
    "files",
    [
        {"w.weight": torch.zeros(2, 2, dtype=torch.int8), "w.weight_scale": torch.ones(2, 1)},
        {"w.qweight": torch.zeros(1, 2, dtype=torch.int32), "w.scales": torch.ones(1, 2)},
    ],
    ids=["int8", "gptq"],
)
def test_weights_that_are_quantised_in_a_way_that_config_json_does_not_state_are_told_as_such(
    tmp_path: Path, files: dict[str, torch.Tensor]
) -> None:
    save_file(files, tmp_path / "model.safetensors")
    record = WeightRecord(torch.float32)
    record.tensor(Piece((Slice.all_of("w.weight", (2, 2)),), torch.float32))
    with pytest.raises(CheckpointError, match="are of quantised weights; take the model that they were made from"):
        check(record, scan_checkpoint(tmp_path), (), folder=tmp_path)


def test_a_plain_checkpoint_that_does_not_fit_is_not_called_quantised(tmp_path: Path) -> None:
    save_file({"v": torch.zeros(2, 2), "ids": torch.zeros(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    record = WeightRecord(torch.float32)
    record.tensor(Piece((Slice.all_of("w", (2, 2)),), torch.float32))
    with pytest.raises(CheckpointError, match=r"'w' .* is missing") as error:
        check(record, scan_checkpoint(tmp_path), (), folder=tmp_path)
    assert "quantised" not in str(error.value)
