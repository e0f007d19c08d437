"""A rank that is killed, stopped or broken ends the engine within the deadline; the first cause is told, and none is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import noise
import psutil
import pytest
from chaos.faulty_engine import OUT_OF_MEMORY
from chaos.harness import started
from pairwise import spread

DEADLINE_S = 3.0
OPTIONS = {
    **noise.OPTIONS,
    "tp": 2,
    "device": "cpu",
    "dtype": "float32",
    "num_pages": 512,
    "num_threads": 1,
    "step_deadline": DEADLINE_S,
}
FOREVER, LONG = 500, 480
PROGRAM = Path(__file__).parent / "rank_engine.py"


class Pair:
    """The process of an engine, and that of its second rank."""

    def __init__(self, *, prompt_len: int = 4, num_tokens: int = FOREVER, path: Path | None = None, **options: object) -> None:
        """path: before the others that Python imports from."""
        paths = [*([] if path is None else [str(path)]), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps([OPTIONS | options, prompt_len, num_tokens])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": ":".join(paths)},
        )
        deadline_s = time.monotonic() + 60
        while not (found := psutil.Process(self.process.pid).children()):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        self.rank = found[0]

    def until(self, word: str) -> None:
        """Read on to the line that begins so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return
        raise AssertionError(f"it ended without {word!r}: {self.process.communicate()[1]}")

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self) -> tuple[str, str]:
        """What it said last, and its stderr."""
        out, err = self.process.communicate(timeout=90)
        _, alive = psutil.wait_procs([self.rank], timeout=5)
        assert not alive
        return (out.strip().splitlines() or [""])[-1], err


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        with pair.process:  # closes its pipes
            pair.process.kill()


def pair_at(when: str, pairs: list[Pair], **options: object) -> Pair:
    """One that is loading, idle, amid a long prompt, or decoding."""
    if when == "prefill":
        pairs.append(Pair(prompt_len=LONG, num_tokens=2, max_batch_tokens=2, prefix_cache=False, **options))
    else:
        pairs.append(Pair(**options))
    pair = pairs[-1]
    if when != "boot":
        pair.until("ready")
    if when in ("prefill", "decode"):
        pair.begin()
        pair.until("begun" if when == "prefill" else "token 5")
    return pair


TENSOR, LANES, STAGES = {"tp": 2}, {"tp": 1, "dp_attention": 2}, {"tp": 1, "pp": 2}
TIMES = [("boot", TENSOR), ("prefill", TENSOR), ("decode", STAGES), ("boot", LANES), ("prefill", STAGES), ("decode", LANES)]
TIMES += [("decode", TENSOR), ("boot", STAGES), ("prefill", LANES)]


@pytest.mark.parametrize(("when", "mesh"), spread(TIMES, 5), ids=str)
def test_the_engine_ends_with_a_killed_rank(when: str, mesh: dict[str, int], pairs: list[Pair]) -> None:
    """Of two lanes the killed one has no request: it runs with the other. Of two stages, steps are on their way to both."""
    pair = pair_at(when, pairs, **mesh)
    pair.rank.kill()
    said, _ = pair.end()
    assert f"ended: rank 1 (process {pair.rank.pid}) was killed by SIGKILL" in said
    assert pair.process.returncode == 1


@pytest.mark.parametrize(
    ("when", "mesh"), spread([("decode", TENSOR), ("boot", TENSOR), ("prefill", STAGES), ("decode", STAGES)], 2), ids=str
)
def test_the_engine_ends_when_a_rank_was_stopped(when: str, mesh: dict[str, int], pairs: list[Pair]) -> None:
    deadline_s = DEADLINE_S / 3 if when == "boot" else DEADLINE_S
    pair = pair_at(when, pairs, step_deadline=deadline_s, **mesh)
    pair.rank.send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    said, _ = pair.end()
    silent_s = deadline_s * (10 if when == "boot" else 1)  # it was not heard yet
    assert f"ended: rank 1 (process {pair.rank.pid}) has said nothing for {silent_s:g} s" in said
    assert time.monotonic() - began_s < silent_s + 20
    assert pair.process.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_idle_engine_tells_the_next_request(number: signal.Signals, pairs: list[Pair]) -> None:
    pair = pair_at("idle", pairs)
    pair.rank.send_signal(number)
    psutil.wait_procs([pair.rank], timeout=30)  # killed here, or by those that hear nothing of it
    pair.begin()
    assert f"ended: rank 1 (process {pair.rank.pid})" in pair.end()[0]


@pytest.mark.parametrize("when", spread(["decode", "boot"], 1))
def test_a_rank_never_outlives_the_engine(when: str, pairs: list[Pair]) -> None:
    pair = pair_at(when, pairs)
    pair.process.kill()
    _, alive = psutil.wait_procs([pair.rank], timeout=5 if when != "boot" else 30)  # as long as its imports take
    assert not alive


def test_signals_to_every_process_are_the_engine_s_to_answer(pairs: list[Pair]) -> None:
    """As systemd sends them to all: a server goes on until its requests have ended, so its ranks have to."""
    pair = pair_at("decode", pairs)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        pair.rank.send_signal(number)
    pair.until("token 50")


def test_a_rank_that_is_stuck_where_no_thread_of_it_runs_goes_with_the_engine(pairs: list[Pair], tmp_path: Path) -> None:
    """As in a call of a device: nobody reads there that stdin has ended."""
    stuck = tmp_path / "stuck"
    holds = f"import ctypes, pathlib; pathlib.Path({str(stuck)!r}).touch(); ctypes.PyDLL(None).sleep(1000)"
    pair = pair_at("decode", pairs, path=broken(tmp_path, holds, step=20), step_deadline=60)
    end_s = time.monotonic() + 60
    while not stuck.exists():
        assert time.monotonic() < end_s
        time.sleep(0.02)
    pair.process.kill()
    _, alive = psutil.wait_procs([pair.rank], timeout=5)
    for rank in alive:
        rank.kill()
    assert not alive


def test_a_rank_that_raises_is_the_cause(pairs: list[Pair], tmp_path: Path) -> None:
    """What it printed, its traceback, comes before."""
    pairs.append(Pair(path=broken(tmp_path, "raise ValueError('rank 1 has had enough')")))
    pairs[-1].until("ready")
    pairs[-1].begin()
    said, err = pairs[-1].end()
    assert f"ended: rank 1 (process {pairs[-1].rank.pid}) broke: ValueError: rank 1 has had enough" in said
    assert "rank 1: ValueError: rank 1 has had enough" in err


OUT = "import torch; raise torch.OutOfMemoryError('3.14 TiB')"
SHORT = [(rank, when) for when in ("decode", "boot", "prefill") for rank in (0, 1)]


@pytest.mark.parametrize(("rank", "when"), spread(SHORT, 2))
def test_the_engine_ends_when_memory_runs_out_on_a_rank(rank: int, when: str, pairs: list[Pair], tmp_path: Path) -> None:
    """On the engine's own too, which goes on where there is no other. Rank 0 raises to its caller."""
    path = broken(tmp_path, OUT, rank=rank, step=None if when == "boot" else 20)
    pair = pair_at(when, pairs, path=path)
    said, err = pair.end()
    assert f"{'rank 1: ' * rank}torch.OutOfMemoryError: 3.14 TiB" in err
    assert f"ended: rank 1 (process {pair.rank.pid}) broke: torch.OutOfMemoryError: 3.14 TiB" in said or rank == 0
    assert pair.process.returncode == 1


def test_a_server_starts_its_engine_again_when_memory_ran_out_on_the_first_rank() -> None:
    """A step that fails there cannot be given up alone: the other rank has run it. The cause comes last."""
    options = {"tp": 2, "device": "cpu", "dtype": "float32", "step_deadline": DEADLINE_S}
    asked = {"seed": OUT_OF_MEMORY, "max_tokens": 8, "ignore_eos": True}
    why = "the engine broke: torch.OutOfMemoryError: CUDA out of memory"
    with started(options=options, restarts=1) as server:
        refused = server.complete("x", **asked)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_restarting")
        assert why in refused.json()["error"]["message"]
        server.until(lambda: server.http.get("/health").status_code == 200)
        server.assert_healthy()
        assert server.complete("x", **asked).status_code == 503
        assert server.process.wait(90) == 1
        *_, last, step = server.said().strip().splitlines()
        assert (last.startswith(f"engine: {why}"), step.startswith("in step ")) == (True, True)


@pytest.mark.parametrize(
    ("when", "mesh"), spread([("decode", TENSOR), ("boot", TENSOR), ("prefill", STAGES), ("decode", LANES)], 3), ids=str
)
def test_a_rank_that_hangs_is_named_and_all_stacks_are_told(
    when: str, mesh: dict[str, int], pairs: list[Pair], tmp_path: Path
) -> None:
    """The other waits for it in an exchange, which ends with the engine and not by a deadline of its own. Of stages, a step later
    is on its way."""
    step = None if when == "boot" else 20
    pair = pair_at(when, pairs, path=broken(tmp_path, "import time; time.sleep(1000)", step=step), **mesh)
    said, err = pair.end()
    where = "its start, in start: " if step is None else f"step {step + (mesh is STAGES)}, in "
    assert f"rank 1 (process {pair.rank.pid}) hangs: for {DEADLINE_S:g} s it has done nothing in {where}" in said
    assert "in failing" in err


def test_ranks_that_wait_for_each_other_in_different_exchanges_are_ended(pairs: list[Pair], tmp_path: Path) -> None:
    """Neither would ever come back: one has begun an exchange that the other knows nothing of."""
    path = broken(tmp_path, "import torch; self._group.of_all(torch.zeros(3))", step=20)
    said, err = pair_at("decode", pairs, path=path).end()
    told = "ended: the ranks wait for each other in step 20: rank 0 in the exchange 'sum', rank 1 in the exchange 'of_all'"
    assert said.startswith(told)
    assert "in failing" in err


def test_a_first_rank_that_hangs_loses_the_others_and_ends_when_it_comes_back(pairs: list[Pair], tmp_path: Path) -> None:
    """It is the engine's own process, whose thread nobody interrupts outside of an exchange.

    Two deadlines are waited for, not ten, which `tests/engine/test_patience.py` counts: with a shorter one a busy host breaks it.
    """
    back = tmp_path / "back"
    shorter = "import time, pathlib, enginery.engine.ranks.patience as rule; rule.FURTHER = 2"
    hangs = f"{shorter}; [time.sleep(0.05) for _ in iter(pathlib.Path({str(back)!r}).exists, True)]"
    pairs.append(Pair(path=broken(tmp_path, hangs, rank=0, step=20)))
    pairs[-1].until("ready")
    pairs[-1].begin()
    psutil.wait_procs([pairs[-1].rank], timeout=60)
    assert not pairs[-1].rank.is_running()
    assert pairs[-1].process.poll() is None
    back.touch()
    said, err = pairs[-1].end()
    assert f"ended: step 20 has got no further for {2 * DEADLINE_S:g} s; --step-deadline {DEADLINE_S:g} allows no more" in said
    assert "in failing" in err


def test_a_server_starts_its_engine_again_when_an_idle_rank_was_killed(pairs: list[Pair], tmp_path: Path) -> None:
    """Over HTTP: the request after it is told who was killed, and one later is served by other processes."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if name != "load_format"]
    flags += ["--load-format=dummy", "--restarts=1"]
    with serving(tmp_path / "log", *flags) as (process, url), httpx.Client(base_url=url, timeout=60) as client:
        asked = {"prompt": [7, 8, 9], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
        first = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        (rank,) = ranks_of(process)
        rank.kill()
        while (health := client.get("/health").json()["status"]) == "ready":
            time.sleep(0.02)
        refused = client.post("/v1/completions", json=asked)
        assert (health, refused.status_code, refused.headers["retry-after"]) == ("restarting", 503, "1")
        assert f"rank 1 (process {rank.pid}) was killed by SIGKILL" in refused.json()["error"]["message"]
        while client.get("/health").status_code != 200:
            time.sleep(0.1)
        assert client.post("/v1/completions", json=asked).json()["choices"][0]["text"] == first
        assert ranks_of(process) != [rank]
    assert "the engine is started again, 0 times more" in (tmp_path / "log").read_text()


@contextlib.contextmanager
def serving(log: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`engine serve` in a process of its own, and its URL. log: what it writes to stderr."""
    command = [sys.executable, "-m", "enginery", "serve", "--port=0", *flags]
    with log.open("w") as stderr, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        assert process.stdout is not None
        try:
            lines = iter(process.stdout)
            url = next((found[1] for line in lines if (found := re.search(r"at (http://[^,]+),", line))), None)
            assert url is not None, log.read_text()
            yield process, url
        finally:
            process.terminate()
            process.stdout.read()


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of ranks of a server's engine."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "enginery.engine.ranks.process" in child.cmdline()]


def broken(folder: Path, code: str, *, rank: int = 1, step: int | None = 2) -> Path:
    """A folder whose `sitecustomize` has a rank do this in that step, or where it makes its KV memory."""
    whose = "enginery.engine.ranks.process" if rank else "rank_engine.py"
    module, names = (
        ("enginery.worker.runner", ["Runner"]) if rank == 0 else ("enginery.worker.ranks.stages", ["Follower", "EarlyStage"])
    )
    method, step_of = ("launch" if rank == 0 else "run"), "given[0].number"
    if step is None:
        module, names, method, step_of = "enginery.kv.pool", ["PagedKVPool"], "__init__", "None"
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        f"if {whose!r} in ' '.join(sys.orig_argv):\n"
        f"    import {module} as module\n"
        "    def breaking(run):\n"
        "        def failing(self, *given, **named):\n"
        f"            if {whose!r} in ' '.join(sys.orig_argv) and {step_of} == {step}:\n"  # a forked rank has what is patched here
        f"                {code}\n"
        "            return run(self, *given, **named)\n"
        "        return failing\n"
        f"    for name in {names}:\n"
        "        owner = getattr(module, name)\n"
        f"        owner.{method} = breaking(owner.{method})\n"
    )
    return folder
