"""What the kit can see on a CUDA device only: captured steps, and waiting for the device."""

from __future__ import annotations

import pytest

from enginery.testing.conformance import RULES, run_conformance
from enginery.testing.subject import Subject
from enginery.testing.suite import AttnBackendSuite

pytestmark = pytest.mark.gpu


class TestGraphs(AttnBackendSuite):
    backend = "core.testing.graph_backend:GRAPHS"
    device = "cuda"


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("NEVER_REFRESHES", "captured-equals-eager"),
        ("KEEPS_OLD_PAGES", "captured-equals-eager"),
        ("STAYS_NOBODYS", "mixed-captured"),
        ("SYNCS_IN_ATTEND", "attend-reads-nothing"),
        ("SYNCS_IN_PLANNING", "planning-reads-nothing"),
    ],
)
def test_a_bad_backend_is_caught_on_the_gpu(name: str, rule: str) -> None:
    subject = Subject.imported(f"core.testing.graph_backend:{name}", device="cuda")
    report = run_conformance(subject, rules=tuple(each for each in RULES if each.name == rule))
    assert report.count("failed") > 0
    assert all(row.message.startswith(f"{rule}: ") for row in report.rows if row.outcome == "failed")
