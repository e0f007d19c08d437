"""A real server in processes of its own, with a model of random weights, and what must hold of it after every attack.

A step takes `STEP_S` at the least, so that what a test must see lasts long enough on any machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import noise
import psutil
from pairwise import EVERYTHING
from prometheus_client.parser import text_string_to_metric_families

HERE = Path(__file__).parent
MAX_MODEL_LEN = 1024
NUM_PAGES = 192
OPTIONS = {
    **noise.OPTIONS,
    "max_model_len": MAX_MODEL_LEN,
    "num_pages": NUM_PAGES,
    "max_batch_tokens": 128,
    "max_batch_requests": 16,
    "max_queued_requests": 64,
    "num_threads": 1,
}
SETTINGS = {"watchdog_s": 1.5, "drain_s": 40.0, "limits": {"receive_s": 2.0, "send_s": 2.0}}
STEP_S = 0.004
TRIALS = {} if EVERYTHING else {"CHAOS_TRIAL_S": "1.0"}  # of evil grammars, which all take as long as they may
CONTROL = {"prompt": "The quick brown fox jumps over", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}


class Server:
    """One running server. answer: to the control request, when it was fresh."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path, key: str | None) -> None:
        self.process = process
        self.url = url
        self._log = log
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=url, timeout=150, headers=headers)
        self.answer = self.control()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.split("//")[1].split(":")
        return host, int(port)

    @property
    def engine_pid(self) -> int:
        """Of the engine's process."""
        return self.child("faulty_engine")

    @property
    def template_pid(self) -> int:
        """Of the process that renders the chat template; it starts with the first chat."""
        answer = self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        return self.child("template_process")

    def child(self, name: str) -> int:
        """The process whose command has that name in it."""
        return next(child.pid for child in psutil.Process(self.process.pid).children() if name in " ".join(child.cmdline()))

    def said(self) -> str:
        """All that the processes wrote to stderr."""
        return self._log.read_text()

    def complete(self, prompt: object, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": prompt, **body})

    def control(self) -> str:
        """The text of a greedy request and its tokens' log-probabilities."""
        response = self.http.post("/v1/completions", json=CONTROL)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        return json.dumps([choice["text"], [round(value, 4) for value in choice["logprobs"]["token_logprobs"]]])

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics; the sum of those that have these labels."""
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(name)]  # the others are hundreds
        families = text_string_to_metric_families("\n".join(lines) + "\n")
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        assert samples, f"{name} is not in /metrics"
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def memory(self) -> float:
        """Resident bytes of both processes."""
        return self.metric("process_resident_memory_bytes") + self.metric("enginery_engine_process_resident_memory_bytes")

    def until(self, condition: Callable[[], bool], seconds: float = 90) -> None:
        """Wait, and fail if it does not come true."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"it did not come true in {seconds} s\n{self.said()[-4000:]}"
            time.sleep(0.05)  # to tell it takes the server some 10 ms

    def is_idle(self) -> bool:
        """No request is open, and every page is free or in the prefix cache."""
        stats = self.http.get("/server_info").json()["stats"]
        idle = stats["num_running"] == stats["num_waiting"] == 0 and self.metric("enginery:requests_open") == 0
        return idle and stats["free_pages"] + stats["cached_pages"] == NUM_PAGES

    def assert_healthy(self) -> None:
        """What must hold after everything."""
        ready = self.http.get("/health/ready")
        assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
        assert self.control() == self.answer
        self.until(self.is_idle)


@contextlib.contextmanager
def started(
    key: str | None = None,
    *,
    options: dict[str, Any] | None = None,
    step_s: float = STEP_S,
    prefix: Sequence[str] = (),
    **settings: Any,
) -> Iterator[Server]:
    """A fresh server, in a process group of its own.

    key: that the client sends. options: over `OPTIONS`; settings: over `SETTINGS`. prefix: a command that runs it.
    """
    arguments = [json.dumps(OPTIONS | (options or {})), json.dumps(SETTINGS | settings)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CHAOS_STEP_S": str(step_s), **TRIALS}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [*prefix, sys.executable, str(HERE / "chaos_server.py"), *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environ,
                start_new_session=True,
            )
        assert process.stdout is not None
        try:
            url = next((found[1] for line in process.stdout if (found := re.match(r"ready: \S+ at (http\S+),", line))), None)
            assert url is not None, log.read_text()
            server = Server(process, url, log, key)
            try:
                yield server
            finally:
                server.http.close()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGTERM)
            process.stdout.close()
            process.wait(20)
