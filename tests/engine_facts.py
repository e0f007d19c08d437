"""What a live engine says of itself, made up."""

from __future__ import annotations

from typing import Any

from enginery.contracts.engine import EngineFacts


def engine_facts(**changes: Any) -> EngineFacts:
    """Of a small model named m, but for what is given."""
    usual: dict[str, Any] = {
        "model_name": "m",
        "folder": "f",
        "max_model_len": 64,
        "vocab_size": 8,
        "dtype": "bfloat16",
        "attn_backend": "none",
        "note": "",
        "num_pages": 10,
        "page_size": 16,
        "eos_token_ids": (),
        "decisions": (),
    }
    return EngineFacts(**(usual | changes))
