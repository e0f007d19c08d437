"""What several files of these tests run with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine.rank_pair import KeptRanks


@pytest.fixture(scope="module")
def kept() -> Iterator[KeptRanks]:
    """The second rank's process, for all engines of a module."""
    ranks = KeptRanks(1)
    yield ranks
    ranks.stop()
