"""The Dockerfile, without Docker: what it copies exists, it installs as make does, and what it starts and asks is the server."""

from __future__ import annotations

import fnmatch
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from free_ports import free_ports
from make_lines import installs

from enginery.serve.http.keys import PUBLIC
from enginery.serve.settings import ServeSettings

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
IGNORED = ROOT / ".dockerignore"


@dataclass(frozen=True)
class Step:
    """An instruction, and the stage that it is in, counted from 0."""

    stage: int
    word: str
    rest: str


def steps(text: str) -> list[Step]:
    """In order; those before the first FROM are of stage -1."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    found: list[Step] = []
    stage = -1
    for line in lines:
        if line.strip() and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            stage += word == "FROM"
            found.append(Step(stage, word, rest.strip()))
    return found


STEPS = steps(DOCKERFILE.read_text())
LAST = [step for step in STEPS if step.stage == STEPS[-1].stage]


def only(word: str) -> Step:
    """The one of the image that is shipped."""
    (found,) = [step for step in LAST if step.word == word]
    return found


def is_sent(path: str, patterns: list[str]) -> bool:
    """Whether a path of the tree reaches the build: the last pattern that fits it or a folder of it decides."""
    sent = True
    parts = Path(path).parts
    heads = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    for pattern in patterns:
        plain = pattern.removeprefix("!").removeprefix("**/")
        names = parts if "**/" in pattern else heads[:1]
        if any(fnmatch.fnmatch(name, plain) for name in names):
            sent = pattern.startswith("!")
    return sent


def test_what_is_copied_exists_and_is_sent_to_the_build() -> None:
    patterns = IGNORED.read_text().split()
    copies = [shlex.split(step.rest) for step in STEPS if step.word == "COPY"]
    own = [path for words in copies if not words[0].startswith("--from") for path in words[:-1]]
    assert {"core", "plugins", "Makefile"} <= set(own)
    assert [path for path in own if not (ROOT / path).exists() or not is_sent(path, patterns)] == []
    needed = subprocess.run(
        ["git", "ls-files", "core", "plugins"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    lost = [path for path in needed if not is_sent(path, patterns)]
    assert all("/tests/" in path for path in lost), "only tests stay behind"
    for unwanted in (".git/config", ".venv/bin/python", "core/enginery/__pycache__/a.pyc", "tests/meta/test_tree.py", "keys.txt"):
        assert not is_sent(unwanted, patterns), unwanted


def test_what_make_reads_is_copied_before_it_runs() -> None:
    build = [step for step in STEPS if step.stage == 0]
    (making,) = [place for place, step in enumerate(build) if step.word == "RUN" and "make venv" in step.rest]
    copied = " ".join(step.rest for step in build[:making] if step.word == "COPY")
    read = {"Makefile", "pyproject.toml", "constraints.txt", "LICENSE", "core", "plugins"} | set(
        re.findall(r'readme = "(.+)"', (ROOT / "pyproject.toml").read_text())
    )
    assert [name for name in read if name not in copied.split()] == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_image_is_installed_as_make_installs(device: str, tmp_path: Path) -> None:
    (run,) = [step.rest for step in STEPS if step.word == "RUN" and "make " in step.rest and "apt-get" not in step.rest]
    words = shlex.split(run.split("&&")[0].replace("${DEVICE}", device))
    assert words[:2] == ["make", "venv"]
    given = [word for word in words[2:] if not word.startswith("VENV=")]
    assert given == [f"DEVICE={device}"]
    assert installs(tmp_path, "venv", *given) == installs(tmp_path, "serve", *given)
    venv = next(word.removeprefix("VENV=") for word in words if word.startswith("VENV="))
    assert f"--from=build {venv} {venv}" in [step.rest for step in LAST if step.word == "COPY"]
    assert f"PATH={venv}/bin:$PATH" in only("ENV").rest
    folder = next(step.rest for step in STEPS if step.word == "WORKDIR")
    assert f"--from=build {folder} {folder}" in [step.rest for step in LAST if step.word == "COPY"], "the installation is editable"


@pytest.mark.skipif(shutil.which("sh") is None, reason="there is no sh")
def test_the_steps_are_sound_shell() -> None:
    for step in STEPS:
        if step.word == "RUN":
            done = subprocess.run(["sh", "-n", "-c", step.rest], capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{step.rest}: {done.stderr}"


def test_it_does_not_run_as_root() -> None:
    made = next(step.rest for step in LAST if step.word == "RUN" and "useradd" in step.rest)
    assert made.split()[-1] == only("USER").rest != "root"
    places = [step.word for step in LAST]
    assert places.index("USER") > max(place for place, word in enumerate(places) if word in ("RUN", "COPY"))


def test_the_port_is_the_servers_own() -> None:
    port = inspect.signature(ServeSettings).parameters["port"].default
    assert int(only("EXPOSE").rest) == port
    assert f"http://127.0.0.1:{port}/" in only("HEALTHCHECK").rest


def test_what_it_starts_serves_and_its_health_check_tells_when(tmp_path: Path) -> None:
    command = json.loads(only("ENTRYPOINT").rest)
    assert command[0] == "engine"
    check = json.loads(only("HEALTHCHECK").rest.partition(" CMD ")[2])
    assert re.search(r"127\.0\.0\.1:\d+(/[\w/]+)", check[-1])[1] in PUBLIC, "it has no key"
    port = free_ports()
    check = [sys.executable, *check[1:-1], check[-1].replace(f":{only('EXPOSE').rest}/", f":{port}/")]
    environ = {**os.environ, "ENGINERY_PORT": str(port), "ENGINERY_HOST": "127.0.0.1", "ENGINERY_NUM_PAGES": "64"}
    words = [word.replace("0.0.0.0", "127.0.0.1") for word in command[1:]]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "enginery", *words], stdout=log, stderr=log, env=environ)
    try:
        assert subprocess.run(check, capture_output=True, check=False).returncode == 1, "it says healthy before it is"
        deadline = time.monotonic() + 120
        while subprocess.run(check, capture_output=True, check=False).returncode != 0:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(1)  # each check is a process, and takes a second from the server
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_steps_are_told_apart() -> None:
    made = steps("ARG A=1\n# no\nFROM x AS b\nRUN one \\\n  two\nFROM y\nUSER u\n")
    assert [(step.stage, step.word, step.rest.split()) for step in made] == [
        (-1, "ARG", ["A=1"]),
        (0, "FROM", ["x", "AS", "b"]),
        (0, "RUN", ["one", "two"]),
        (1, "FROM", ["y"]),
        (1, "USER", ["u"]),
    ]
    assert not is_sent("core/tests/a.py", ["*", "!core", "**/tests"])
    assert is_sent("core/a.py", ["*", "!core", "**/tests"])
    assert not is_sent("x", ["*", "!core"])
