"""The whole server as a process."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SERVER = str(Path(__file__).with_name("fake_server.py"))


@contextlib.contextmanager
def started(folder: Path, port: int = 0, *, drain_s: float = 1.0, **settings: object) -> Iterator[tuple[subprocess.Popen, str]]:
    command = [sys.executable, SERVER, str(folder), str(port), "auto", str(drain_s), json.dumps(settings)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = ""
        for line in process.stdout:
            if found := re.match(r"ready: fake at (https?://\S+),", line):
                url = found[1]
                assert url in process.stdout.readline(), "a curl example comes next"
                break
        yield process, url
    finally:
        process.terminate()
        process.communicate(timeout=10)
