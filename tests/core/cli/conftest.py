"""Makes the fake engine and the small tokenizers importable, and runs no plugin."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "serve"), str(TESTS / "core" / "text")]

from fake_engine import FakeEngine  # noqa: E402
from tokenizers_made import byte_level, save  # noqa: E402

from enginery.config.schema import EngineOptions  # noqa: E402


@pytest.fixture
def make():
    """Makes the tokenizer."""
    return byte_level


@pytest.fixture
def folder(tmp_path, make):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    path = save(make(), tmp_path / "checkpoint", chat_template=template)
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    return path


@pytest.fixture
def engine(folder):
    return FakeEngine(EngineOptions(model=str(folder)))
