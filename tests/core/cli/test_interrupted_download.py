"""Ctrl-C while a model is downloaded: one is enough, though the hub's client waits for its threads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

_COMMIT = "0" * 40
_FILES = ("config.json", "model.safetensors")


class SlowHub(ThreadingHTTPServer):
    """Has one model, whose files never come to their end. asked: somebody waits for the weights."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked = threading.Event()
        self.ended = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: SlowHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(b"", size=1 << 20)

    def do_GET(self) -> None:
        if "/tree/" in self.path:
            self._answer(json.dumps([{"type": "file", "path": name, "size": 1 << 20, "oid": _COMMIT} for name in _FILES]).encode())
        elif self.path.startswith("/api/models/"):
            found = {"id": "Acme/slow", "sha": _COMMIT, "siblings": [{"rfilename": name} for name in _FILES]}
            self._answer(json.dumps(found).encode())
        elif self.path.startswith("/Acme/slow/"):
            self._answer(b"x", size=1 << 20)
            self.server.asked.set()
            self.server.ended.wait(60)
        else:
            self.send_error(404)

    def _answer(self, body: bytes, *, size: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) if size is None else size))
        self.send_header("ETag", f'"{_COMMIT}"')
        self.send_header("X-Repo-Commit", _COMMIT)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def hub() -> Iterator[SlowHub]:
    made = SlowHub()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.ended.set()
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("generate", "Hi")], ids=lambda command: command[0])
def test_one_ctrl_c_ends_a_download(command: tuple[str, ...], hub: SlowHub, tmp_path: Path) -> None:
    place = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    whole = [sys.executable, "-m", "enginery", *command, "-m", "Acme/slow"]
    started = subprocess.Popen(whole, env=os.environ | place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert hub.asked.wait(60), started.communicate(timeout=5)
        started.send_signal(signal.SIGINT)
        said, _ = started.communicate(timeout=15)
    finally:
        started.kill()
    assert started.returncode == 130
    assert "Traceback" not in said
    assert "HTTP Request" not in said
