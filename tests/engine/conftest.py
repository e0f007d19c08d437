"""What several files of these tests run with. Makes the small tokenizers importable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.rank_pair import KeptRanks

sys.path.insert(0, str(Path(__file__).parents[1] / "core" / "text"))


@pytest.fixture(scope="module")
def kept() -> Iterator[KeptRanks]:
    """The second rank's process, for all engines of a module."""
    ranks = KeptRanks(1)
    yield ranks
    ranks.stop()
