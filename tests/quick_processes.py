"""Processes of the engine are forked from one that has imported what they import: some 0.1 s of a core instead of 2 to 6.

`subprocess.Popen` of such a command asks a process beside this one, the nursery, which imports once and then forks
(forked_processes.py). What it forks is a child of this process as any other is, with its own arguments, environment, files and
working directory, and goes on as a fresh interpreter would. A server that was made so forks its own children itself. Scripts that
compile kernels are forked too, as they import torch, and what `nohup`, `ip netns` or a shell with `ulimit` runs. Everything else is
started as always, and with FULL_TESTS=1 and on a CUDA device all is; so is what a test with the fixture `own_processes` starts.

What differs: modules are there that the command did not import (tests/meta/test_cheap_start.py starts its own processes), variables
that are read when torch is imported must be those of the test process, and what happens after `atexit` does not happen.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forked_processes import fork_here, nurse, read

MODULES = (
    *("enginery", "enginery.serve.engine.process", "enginery.engine.ranks.process"),
    *("enginery.testing.child", "enginery.bench.startup", "pytest"),
)
# They limit their address space, of which torch would take much: forked from a process without it. Servers start them as always.
SMALL = ("enginery.text.template_process",)
# What is imported beside the engine's own modules, for code about what those import.
LIGHT = (
    *("annotated_types", "fastapi", "jinja2", "msgspec", "orjson", "packaging.requirements", "pluggy", "prometheus_client"),
    *("pydantic.v1", "rich.console", "starlette.applications", "tokenizers", "typer", "zmq.asyncio"),
)
SCRIPTS = (
    "chaos/chaos_server.py",
    "chaos/faulty_engine.py",
    "chaos/rank_engine.py",
    "serve/fake_server.py",
    "serve/fake_engine.py",
    "engine/joined_engine.py",
)
IN_NAMESPACE = ("ip", "netns", "exec")  # and its name, before a command
UNDER_NOHUP = ("nohup",)
STARTS = "from enginery.cli.main import main"  # in the code that `engine bench serve` runs as its server
COMPILES = "/tests/hopper_"  # in the names of scripts that `compile_only` runs
IMPORTED = (
    *("enginery.cli.main", "enginery.serve.server", "enginery.engine.engine", "enginery.serve.engine.process", "enginery.llm.llm"),
    "enginery.engine.ranks.process",
    *("torch", "tokenizers", "uvicorn", "uvicorn.protocols.http.h11_impl", "uvicorn.lifespan.on", "uvicorn.loops.asyncio"),
    *("h11", "zmq.asyncio", "jinja2", "huggingface_hub", "enginery.testing.child", "enginery.api", "pytest"),
    *("pydantic.v1", "encodings.idna", "rich._emoji_codes", "uvicorn.lifespan.off"),
)
# pytest's plugins that nobody needs, as in pyproject.toml, which a pytest elsewhere does not read: they import for 1.3 s.
WITHOUT_PLUGINS = ("-p", "no:langsmith_plugin", "-p", "no:schemathesis", "-p", "no:anyio")
# Of a pytest that is forked where it makes errors of warnings.
PYTEST_FLAGS = (
    *("-W", "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"),
    *WITHOUT_PLUGINS,
)
# Read when something is imported, so that they must be what they were then; the latter by what torch is.
FIXED = ("PYTHON", "LD_", "MALLOC_")
FIXED_BY_TORCH = ("OMP_", "MKL_", "TORCH", "TRITON", "CUDA")
BUT = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTEST_")
ROOM_FOR_ARGUMENTS = 1 << 14
_PR_SET_CHILD_SUBREAPER = 36
_LOCK = threading.Lock()  # of all nurseries: which process gets the children of those that end is set for the whole process


class Nursery:
    """The process that forks, as the one that asks it holds it. Started when it is first needed."""

    def __init__(self, kind: str) -> None:
        """kind: one of `KINDS`, what it imports. Tests find processes by the modules they run."""
        self._kind = kind
        self._ours: socket.socket | None = None
        self._environ: dict[str, str] = {}

    def fits(self, environ: Mapping[str, str]) -> bool:
        """Whether a process with that environment would import the same."""
        if not _forked:
            with _LOCK:
                self._started()
        fixed = FIXED if self._kind == "light" else FIXED + FIXED_BY_TORCH
        names = [name for name in {*self._environ, *environ} if name.startswith(fixed) and not name.startswith(BUT)]
        return all(self._environ.get(name) == environ.get(name) for name in names)

    def fork(self, asked: Mapping[str, Any], files: Sequence[int]) -> int:
        """The number of a new child of this process."""
        with _LOCK:
            ours = self._started()
            prctl = ctypes.CDLL(None).prctl
            prctl(_PR_SET_CHILD_SUBREAPER, 1)  # who loses its parent is this process's child, as the nursery is
            try:
                frame = json.dumps(asked).encode()
                socket.send_fds(ours, [len(frame).to_bytes(8, "big")], list(files))
                ours.sendall(frame)
                return int.from_bytes(read(ours, 8), "big")
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def _started(self) -> socket.socket:
        if self._ours is None:
            self._environ = dict(os.environ)
            self._ours, theirs = socket.socketpair()
            command = [sys.executable, __file__, str(theirs.fileno()), "-" * ROOM_FOR_ARGUMENTS, self._kind]
            with theirs:
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            atexit.register(_end, self._ours, process)
        return self._ours


def _end(ours: socket.socket, process: subprocess.Popen[bytes]) -> None:
    ours.close()
    process.wait()


# What each imports; `whole` what engines and servers do, and plugins.
KINDS: Mapping[str, Sequence[str]] = {"whole": (), "small": SMALL, "light": LIGHT, "torch": (*LIGHT, "torch")}
NURSERIES = {kind: Nursery(kind) for kind in KINDS}
NURSERY, SMALL_NURSERY = NURSERIES["whole"], NURSERIES["small"]
_started_as_always = subprocess.Popen._execute_child
_parameters = inspect.signature(_started_as_always)
_is_on = False
_forked = False  # whether this process was
_of_code = ""


def install() -> None:
    """From now on in this process."""
    global _is_on
    _is_on = True
    subprocess.Popen._execute_child = _execute_child  # type: ignore[method-assign]


def _install_in_forked() -> None:
    global _forked
    _forked = True
    install()


@contextlib.contextmanager
def own_processes() -> Iterator[None]:
    """What is started in it is started as always."""
    global _is_on
    before, _is_on = _is_on, False
    try:
        yield
    finally:
        _is_on = before


@contextlib.contextmanager
def code_too(kind: str = "whole") -> Iterator[None]:
    """Also `python -c` in it, which is about the engine and not about how a process begins. kind: behind which of `KINDS`; what is
    about imports is forked from `light` or from `torch`, where no module of the engine is there."""
    global _of_code
    before, _of_code = _of_code, kind
    try:
        yield
    finally:
        _of_code = before


def run_python(*arguments: str, kind: str = "whole", **options: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of Python, also with -c and code. kind: as for `code_too`."""
    with code_too(kind):
        return subprocess.run([sys.executable, *arguments], **options)


def _execute_child(self: subprocess.Popen[Any], *given: Any) -> None:
    asked = _parameters.bind(self, *given).arguments
    around, asked["args"] = _unwrapped(asked["args"])
    environ = dict(os.environ if asked["env"] is None else asked["env"])
    is_code = asked["args"][1:2] == ["-c"] and not _forked
    nursery = SMALL_NURSERY if _is_small(asked["args"]) else NURSERIES[_of_code or "whole"] if is_code else NURSERY
    is_known = nursery is SMALL_NURSERY or _is_of_the_engine(asked["args"])
    if not (_is_on and is_known and _is_plain(asked) and nursery.fits(environ)):
        _started_as_always(self, *given)
        return
    pipes = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
    files = [place if pipe == -1 else pipe for place, pipe in enumerate(pipes)]
    files += sorted(number for number in asked["pass_fds"] if number > 2)
    request = {
        "arguments": [str(each) for each in asked["args"]],
        "environ": environ,
        "folder": str(asked["cwd"] or os.getcwd()),
        "is_session": bool(asked["start_new_session"]),
        "around": around,
        "files": [0, 1, 2, *files[3:]],
    }
    self.pid = nursery.fork(request, files) if not _forked else fork_here(request, files, install=_install_in_forked)
    self._child_created = True
    self._close_pipe_fds(*(asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))


def with_files(flag: str, count: int) -> tuple[str, ...]:
    """Before a command: how many files it may open. flag: of ulimit."""
    return ("sh", "-c", f'ulimit {flag} {count}; exec "$@"', "sh")


def _unwrapped(command: Any) -> tuple[dict[str, Any], Any]:
    """What a command changes for another that it runs, and the other."""
    first = tuple(command[:4]) if isinstance(command, list) else ()
    if first[:3] == IN_NAMESPACE:
        return {"namespace": command[3]}, command[4:]
    if first[:1] == UNDER_NOHUP:
        return {"ignored": signal.SIGHUP}, command[1:]
    if first[:2] == ("sh", "-c"):
        for flag in ("-Sn", "-n"):
            (count,) = re.findall(r"^ulimit \S+ (\d+);", command[2]) or ["0"]
            if first == with_files(flag, int(count)):
                return {"files": [int(count), None if flag == "-Sn" else int(count)]}, command[4:]
    return {}, command


def _is_of_the_engine(command: Any) -> bool:
    if isinstance(command, str | bytes | os.PathLike) or len(command) < 2 or str(command[0]) != sys.executable:
        return False
    first, *rest = [str(each) for each in command[1:] if each != "-P"]
    is_script = first.endswith(SCRIPTS) or COMPILES in first
    is_code = first == "-c" and (bool(_of_code) or (_forked and STARTS in rest[0]))
    return (first == "-m" and rest[0] in MODULES) or is_code or is_script


def _is_small(command: Any) -> bool:
    return not _forked and isinstance(command, list | tuple) and list(command[1:]) in [["-P", "-m", name] for name in SMALL]


def _is_plain(asked: Mapping[str, Any]) -> bool:
    usual = {"executable": None, "preexec_fn": None, "close_fds": True, "shell": False, "restore_signals": True}
    usual |= {"gid": None, "gids": None, "uid": None, "umask": -1, "process_group": -1}
    return all(asked.get(name, value) == value for name, value in usual.items())


def _nurse(link: socket.socket, kind: str) -> None:
    NURSERY._environ = dict(os.environ)
    modules = KINDS[kind]
    nurse(link, modules or IMPORTED, with_plugins=not modules, install=_install_in_forked)


if __name__ == "__main__":
    import quick_processes  # under its own name, as in the processes that are forked

    quick_processes._nurse(socket.socket(fileno=int(sys.argv[1])), sys.argv[3])
