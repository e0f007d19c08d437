"""Row 40 of the checklist, in short. For longer: `tests/chaos/soak_http.py`."""

from __future__ import annotations

from chaos.soak_http import soak
from pairwise import EVERYTHING


def test_row_40_mixed_load_leaves_nothing_behind() -> None:
    seconds = 10 if EVERYTHING else 5
    result = soak(seconds)
    assert result["stream"] > 2 * seconds
