"""For all tests: what is run again when it fails. What processes need that run tests is in tests/every_test.py.

Tests of real processes and browsers also depend on what else the machine does. One that fails is run again once, and the report
counts it; what fails twice fails.
"""

from __future__ import annotations

import os
import signal
import sys

import pytest

# The same are in `with_processes` of the Makefile: tests/meta/test_two_runs.py.
WITH_PROCESSES = ("tests/chaos/", "tests/serve/", "tests/engine/test_bench_serve.py", "plugins/enginery-web/")

# With `-n 2` this process hands tests to its workers and runs none: torch and Triton would take it 3 s, before they begin.
_HANDS_OUT = "-n" in sys.argv and not {"0", "--pdb"} & {*sys.argv} and "PYTEST_XDIST_WORKER" not in os.environ
pytest_plugins = [] if _HANDS_OUT else ["every_test"]

# What nohup or a shell's background ignores, servers that tests start would ignore too: tests of signals would wait for nothing.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what may be run again."""
    for item in items:
        if item.nodeid.startswith(WITH_PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=2))
