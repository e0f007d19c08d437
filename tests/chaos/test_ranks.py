"""A rank that is killed, stopped or broken ends the engine within the deadline; the first cause is told, and nobody is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import noise
import psutil
import pytest

DEADLINE_S = 3.0
OPTIONS = {
    **noise.OPTIONS,
    "tp": 2,
    "device": "cpu",
    "dtype": "float32",
    "num_pages": 512,
    "step_deadline": DEADLINE_S,
    "num_threads": 1,
}
FOREVER, LONG = 500, 480


class Pair:
    """The process of an engine, and that of its second rank."""

    def __init__(
        self, *, prompt_len: int = 4, num_tokens: int = FOREVER, env: dict[str, str] | None = None, **options: object
    ) -> None:
        arguments = json.dumps([OPTIONS | options, prompt_len, num_tokens])
        command = [sys.executable, str(Path(__file__).parent / "rank_engine.py"), arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        deadline_s = time.monotonic() + 60
        while not (found := psutil.Process(self.process.pid).children()):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        self.rank = found[0]

    def until(self, word: str) -> str:
        """Read on to the line that begins so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line
        raise AssertionError(f"it ended without {word!r}: {self.process.communicate()[1]}")

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self) -> tuple[str, str, float]:
        """What it said last, its stderr, and how long that took."""
        began_s = time.monotonic()
        out, err = self.process.communicate(timeout=60)
        psutil.wait_procs([self.rank], timeout=5)
        assert not self.rank.is_running()
        return out.strip().splitlines()[-1], err, time.monotonic() - began_s


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.process.kill()
        pair.process.wait()


def pair_at(when: str, pairs: list[Pair]) -> Pair:
    """One that is loading, idle, amid a long prompt, or decoding."""
    if when == "boot":
        pairs.append(Pair())
        return pairs[-1]
    pairs.append(Pair(prompt_len=LONG, num_tokens=2, max_batch_tokens=2, prefix_cache=False) if when == "prefill" else Pair())
    pair = pairs[-1]
    pair.until("ready")
    if when != "idle":
        pair.begin()
        pair.until("begun" if when == "prefill" else "token 5")
    return pair


@pytest.mark.parametrize("when", ["boot", "prefill", "decode"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_engine_ends_with_a_rank(when: str, number: signal.Signals, pairs: list[Pair]) -> None:
    pair = pair_at(when, pairs)
    pair.rank.send_signal(number)
    said, _, seconds = pair.end()
    if number == signal.SIGKILL:
        assert f"ended: rank 1 (process {pair.rank.pid}) was killed by SIGKILL" in said
        assert seconds < 5 + DEADLINE_S * (when == "boot")
    else:
        assert f"ended: rank 1 (process {pair.rank.pid}) has said nothing for {DEADLINE_S:g} s" in said
        assert seconds < 6 + 2 * DEADLINE_S
    assert pair.process.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_idle_engine_tells_the_next_request(number: signal.Signals, pairs: list[Pair]) -> None:
    pair = pair_at("idle", pairs)
    pair.rank.send_signal(number)
    time.sleep(DEADLINE_S + 2 if number == signal.SIGSTOP else 1)
    pair.begin()
    said, _, seconds = pair.end()
    assert f"ended: rank 1 (process {pair.rank.pid})" in said
    assert seconds < 3


@pytest.mark.parametrize("when", ["boot", "idle", "decode"])
def test_a_rank_never_outlives_the_engine(when: str, pairs: list[Pair]) -> None:
    pair = pair_at(when, pairs)
    pair.process.kill()
    _, alive = psutil.wait_procs([pair.rank], timeout=5)
    assert not alive


def test_a_rank_that_raises_is_the_cause(pairs: list[Pair], tmp_path: Path) -> None:
    """And what it printed comes before: its traceback. A model whose second rank breaks is made by `sitecustomize`."""
    pairs.append(Pair(env=broken(tmp_path, "raise ValueError('rank 1 has had enough')")))
    pairs[-1].until("ready")
    pairs[-1].begin()
    said, err, _ = pairs[-1].end()
    assert f"ended: rank 1 (process {pairs[-1].rank.pid}) broke: ValueError: rank 1 has had enough" in said
    assert "rank 1: ValueError: rank 1 has had enough" in err


def test_a_rank_that_hangs_is_named_and_all_stacks_are_told(pairs: list[Pair], tmp_path: Path) -> None:
    pairs.append(Pair(env=broken(tmp_path, "import time; time.sleep(1000)")))
    pairs[-1].until("ready")
    pairs[-1].begin()
    said, err, seconds = pairs[-1].end()
    assert f"rank 1 (process {pairs[-1].rank.pid}) hangs: for {DEADLINE_S:g} s it has done nothing in step 2" in said
    assert seconds < 6 + 2 * DEADLINE_S
    assert "rank 1:   File" in err
    assert "in launch" in err


def broken(folder: Path, code: str) -> dict[str, str]:
    """An environment in which a rank does this in step 2."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'enginery.engine.ranks.process' in ' '.join(sys.orig_argv):\n"
        "    from enginery.worker.ranks import follower\n"
        "    run = follower.Follower.run\n"
        "    def failing(self, step):\n"
        "        if step.number == 2:\n"
        f"            {code}\n"
        "        run(self, step)\n"
        "    follower.Follower.run = failing\n"
    )
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
