"""Which modules are read as MXFP4, and that their values are those of transformers. tests/parity has whole models."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from enginery.api import FormatNeeds
from enginery.nn.stored import widen
from enginery_format_mxfp4.spec import BLOCKS, MXFP4

CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}


def test_nothing_is_refused() -> None:
    assert MXFP4.refuse(FormatNeeds(config=CONFIG, device="cpu", dtype="float32")) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (1, 6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (1, 6, 3), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0].T  # it has them [columns, rows]
    weight_format = MXFP4.load()
    assert [part.suffix for part in weight_format.parts(BLOCKS)] == ["_blocks", "_scales"]
    stored = weight_format.unpack({"_blocks": blocks[0].flatten(1), "_scales": scales[0]}, BLOCKS)
    assert (stored.values.nbytes, stored.scales.nbytes) == (6 * 48, 6 * 3)
    assert torch.equal(widen(stored, dtype), expected)


@pytest.mark.parametrize(
    ("module", "is_read"),
    [
        ("model.layers.0.mlp.experts.3.gate_up_proj", True),
        ("model.layers.0.mlp.experts.0.down_proj", True),
        ("model.layers.0.mlp.router", False),
        ("model.layers.3.self_attn.q_proj", False),
        ("lm_head", False),
    ],
)
def test_experts_alone_are_stored_so(module: str, is_read: bool) -> None:
    assert MXFP4.reads(CONFIG, module) == (BLOCKS if is_read else None)


def test_experts_that_config_json_lists_are_plain() -> None:
    config = CONFIG | {"modules_to_not_convert": ["model.layers.0.mlp.experts"]}
    assert MXFP4.reads(config, "model.layers.0.mlp.experts.3.down_proj") is None
    assert MXFP4.reads(config, "model.layers.1.mlp.experts.3.down_proj") == BLOCKS
