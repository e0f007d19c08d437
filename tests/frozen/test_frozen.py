"""Plugins that were written for contract 2.0 and frozen then still run, unchanged, and so do their own tests."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import quick_processes
from pairwise import EVERYTHING

HERE = Path(__file__).parent
WHEELS = sorted(HERE.glob("*.whl"))
SERVED = """
import json, sys
import httpx
from enginery.testing.fixtures import serving, write_tiny_checkpoint
from pathlib import Path
flags = ("--load-format", "dummy", "--attention-backend", "frozen", "--schedule-policy", "frozen")
model = write_tiny_checkpoint(Path(sys.argv[1]))
with serving(model, *flags) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
    asked = {"model": http.get("/v1/models").json()["data"][0]["id"], "prompt": "hello", "max_tokens": 4, "temperature": 0}
    answer = http.post("/v1/completions", json=asked | {"ignore_eos": True})
    info = http.get("/server_info").json()["engine"]["decisions"]
    chosen = {made["setting"]: made["value"] for made in info}
    route, tokens = http.get("/frozen").json(), answer.json()["usage"]["completion_tokens"]
    print(json.dumps({"route": route, "tokens": tokens, "chosen": chosen}))
"""
ANSWERS = """
import json, sys
from enginery import LLM, SamplingParams
from enginery.testing.fixtures import open_tiny_llm, write_tiny_checkpoint
from pathlib import Path
model, said = write_tiny_checkpoint(Path(sys.argv[1])), {}
with open_tiny_llm(model, schedule_policy="frozen") as llm:
    (answer,) = llm.generate(["hello"], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    from enginery_observer_frozen import counts
    said["plain"] = {"tokens": len(answer.token_ids), "steps": counts["steps"]}
params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logit_bias={7: 50.0, 8: 50.0})
for drafter, length in (("off", "auto"), ("frozen", "4")):  # `auto` follows what guesses cost on this machine
    with open_tiny_llm(model, drafter=drafter, draft_length=length, attention_backend="torch", dtype="float32") as llm:
        *deltas, last = llm.stream("hello", params)
        tokens = [token for delta in (*deltas, last) for token in delta.token_ids]
        said[drafter] = {"tokens": tokens, "accepted": last.usage.num_accepted_tokens}
print(json.dumps(said))
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of the wheels, installed by pip and by nothing else."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), *map(str, WHEELS)]
    subprocess.run(command, check=True, timeout=150)
    return target


def run(site: Path, *arguments: str, cwd: Path) -> str:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    how = {"cwd": cwd, "env": environ, "capture_output": True, "text": True, "timeout": 150, "check": False}
    done = quick_processes.run_python(*arguments, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheels_are_the_ones_that_were_frozen() -> None:
    sums = dict(line.split("  ")[::-1] for line in (HERE / "SHA256SUMS").read_text().splitlines())
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in WHEELS} == sums


# Each in a process of its own where there is time for that.
TOGETHER = [(wheel,) for wheel in WHEELS] if EVERYTHING else [tuple(WHEELS)]


@pytest.mark.parametrize("wheels", TOGETHER, ids=lambda wheels: wheels[0].name.split("-")[0] if len(wheels) == 1 else "all")
def test_a_frozen_plugins_own_tests_pass(wheels: tuple[Path, ...], site: Path, tmp_path: Path) -> None:
    packages = [wheel.name.split("-")[0] for wheel in wheels]
    flags = ["-rA", "-p", "no:cacheprovider", "-W", "error", "--rootdir", str(site)]
    flags += [] if EVERYTHING else ["-k", "not another-process", *quick_processes.PYTEST_FLAGS]
    said = run(site, "-m", "pytest", *flags, *(str(site / package / "tests") for package in packages), cwd=tmp_path)
    assert all(re.search(rf"^PASSED .*\b{package}/tests/", said, re.MULTILINE) for package in packages)


def test_all_of_them_are_loaded_beside_the_others(site: Path, tmp_path: Path) -> None:
    records = json.loads(run(site, "-m", "enginery", "plugins", "--json", cwd=tmp_path))
    frozen = {record["name"]: (record["status"], record["reason"]) for record in records if record["name"].endswith("-frozen")}
    assert frozen == dict.fromkeys(sorted(frozen), ("loaded", ""))
    assert len(frozen) == len(WHEELS)


def test_a_frozen_command_runs(site: Path, tmp_path: Path) -> None:
    assert run(site, "-m", "enginery", "frozen", "a", "b", cwd=tmp_path) == "b a\n"


@pytest.fixture(scope="module")
def answers(site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of engines with frozen plugins, in one process."""
    folder = tmp_path_factory.mktemp("answers")
    return json.loads(run(site, "-c", ANSWERS, str(folder / "model"), cwd=folder).splitlines()[-1])


def test_an_engine_runs_with_a_frozen_policy_and_a_frozen_observer(answers: dict[str, dict[str, Any]]) -> None:
    assert answers["plain"]["tokens"] == 4
    assert answers["plain"]["steps"] >= 4


def test_an_engine_speculates_with_a_frozen_drafter_and_says_the_same(answers: dict[str, dict[str, Any]]) -> None:
    assert answers["frozen"]["tokens"] == answers["off"]["tokens"]
    assert len(answers["off"]["tokens"]) == 40
    assert answers["frozen"]["accepted"] > 10 > answers["off"]["accepted"] == 0


def test_a_server_answers_at_a_frozen_route_with_a_frozen_backend_and_policy(site: Path, tmp_path: Path) -> None:
    """A process of its own, as `engine serve` is started by people."""
    said = json.loads(run(site, "-c", SERVED, str(tmp_path / "model"), cwd=tmp_path).splitlines()[-1])
    assert said["route"]["state"] == "ready"
    assert {name: type(value) for name, value in said["route"].items()} == {"state": str, "running": int, "waiting": int}
    assert said["tokens"] == 4
    assert (said["chosen"]["attention"], said["chosen"]["schedule policy"]) == ("frozen", "frozen")
