"""The rows of rotary tables: each is its position's, however the table was filled, and what cannot be had is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from enginery.checkpoint.decoder_shape import RopeShape
from enginery.errors import CheckpointError, OutOfMemory
from enginery.nn import rotary
from enginery.nn.rotary import rotary_table

CPU, META = torch.device("cpu"), torch.device("meta")
METHODS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0, 3.0] * 4, "original_max_position_embeddings": 64, "factor": 4.0},
}


def rope(kind: str, **parameters: Any) -> RopeShape:
    return RopeShape(kind=kind, theta=1e4, rotary_dim=16, max_positions=64, parameters=parameters)


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("num_positions", [1, 63, 128, 200])
def test_a_table_filled_in_blocks_is_that_of_one_block(kind: str, num_positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = rope(kind, **METHODS[kind])
    whole = rotary_table(shape, num_positions, dtype=torch.bfloat16, device=CPU)
    seen: list[range] = []
    rows = rotary._rows

    def noted(rope: RopeShape, block: range, num_positions: int) -> torch.Tensor:
        seen.append(block)
        return rows(rope, block, num_positions)

    monkeypatch.setattr(rotary, "_BLOCK", 64)
    monkeypatch.setattr(rotary, "_rows", noted)
    assert torch.equal(rotary_table(shape, num_positions, dtype=torch.bfloat16, device=CPU), whole)
    assert max(map(len, seen)) <= 64
    del seen[:]
    on_meta = rotary_table(shape, num_positions, dtype=torch.bfloat16, device=META)
    assert (on_meta.shape, on_meta.dtype, on_meta.device) == (whole.shape, whole.dtype, META)
    assert sum(map(len, seen)) == 1  # no angles are worked out for a model that only says what it takes


def test_parameters_are_checked_for_a_model_that_only_says_what_it_takes() -> None:
    with pytest.raises(CheckpointError, match="without its parameter 'factor'"):
        rotary_table(rope("linear"), 1 << 40, dtype=torch.float32, device=META)
    assert len(rotary_table(rope("default"), 1 << 40, dtype=torch.float32, device=META)) == 1 << 40


def test_a_table_that_there_is_no_memory_for_names_the_flag() -> None:
    with pytest.raises(OutOfMemory, match="angles of 1,000,000,000,000,000 positions do not fit into memory; take --max-model-len"):
        rotary_table(rope("default"), 10**15, dtype=torch.float32, device=CPU)
