"""The nursery of quick_processes.py, which forks, and how what it forked goes on as a fresh interpreter would."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import importlib.metadata
import json
import logging
import os
import resource
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_NETWORK = 0x40000000  # CLONE_NEWNET
_HERE = Path(__file__).resolve().parent
_own_path: list[str] = []  # what is on `sys.path` whatever PYTHONPATH says


def read(link: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = link.recv(size - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def nurse(link: socket.socket, modules: Sequence[str], *, with_plugins: bool, install: Callable[[], None]) -> None:
    """Import, then fork what is asked for until nobody can ask. install: called in each process that is forked."""
    gc.disable()
    _import_all(modules, with_plugins=with_plugins)
    gc.collect()
    gc.freeze()
    gc.enable()
    while True:
        size, files, _, _ = socket.recv_fds(link, 8, 64)
        if not size:
            return
        request = json.loads(read(link, int.from_bytes(size, "big")))
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            between, made = os.getpid(), os.fork()
            if made:
                os.write(writing, made.to_bytes(8, "big"))
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            _become(request, files, install=install)
        os.waitpid(between, 0)
        link.sendall(os.read(reading, 8))
        for number in (reading, writing, *files):
            os.close(number)


def _import_all(modules: Sequence[str], *, with_plugins: bool) -> None:
    _own_path[:] = [entry for entry in sys.path[1:] if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path.remove(str(_HERE))
    for name in modules:
        importlib.import_module(name)
    for entry in importlib.metadata.entry_points(group="enginery") if with_plugins else ():
        with contextlib.suppress(Exception):  # who asks for it is told
            importlib.import_module(entry.module)


def fork_here(request: Mapping[str, Any], files: Sequence[int], *, install: Callable[[], None]) -> int:
    """In a process that was forked itself, whatever its threads do."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    gc.collect()  # garbage that holds a file would close, in the child, another of the same number
    before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    made = os.fork()
    if made == 0:
        gc.freeze()
        _become(request, files, mask=before, install=install)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return made


def _become(request: Mapping[str, Any], files: Sequence[int], *, install: Callable[[], None], mask: Any = ()) -> None:
    """Go on as a new interpreter would that was started so. Does not return."""
    code = 1
    try:
        _leave_behind(mask)
        gc.unfreeze = _nothing  # what was imported is nobody's garbage, and a look at it copies all of its memory: 0.2 s
        if request["is_session"]:
            os.setsid()
        _change(**request["around"])
        _place(files, request["files"])
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environ"])
        _open_streams(is_unbuffered=bool(os.environ.get("PYTHONUNBUFFERED")))
        _rename(request["arguments"])
        install()
        code = _run([each for each in request["arguments"][1:] if each != "-P"], is_safe="-P" in request["arguments"])
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _nothing() -> None:
    pass


def _change(*, namespace: str = "", ignored: int = 0, files: Sequence[int | None] = ()) -> None:
    """What the command did that was left out. files: the soft limit and the hard one, None as it is."""
    if namespace:
        _enter(namespace)
    if ignored:
        signal.signal(ignored, signal.SIG_IGN)
    if files:
        soft, hard = files
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1] if hard is None else hard))


def _enter(namespace: str) -> None:
    """A network namespace that `ip netns` made. /sys stays that of the one before."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), f"the network namespace {namespace}")


def _leave_behind(mask: Any) -> None:
    """What a process does not pass on to a program that it runs: handlers, loops, loggers, what is to be done at the end."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
    faulthandler.disable()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    asyncio._set_running_loop(None)
    asyncio.set_event_loop_policy(None)
    atexit._clear()
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.filters.clear()
            logger.setLevel(logging.WARNING if logger is logging.root else logging.NOTSET)
            logger.propagate, logger.disabled = True, False


def _place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Those files at these numbers, and no others open."""
    high = [os.dup(number) for number in files]
    high = [_above(number, max(numbers)) for number in high]
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in numbers:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(int(entry))


def _above(number: int, limit: int) -> int:
    return fcntl.fcntl(number, fcntl.F_DUPFD, limit + 1)


def _open_streams(*, is_unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    if is_unbuffered:
        sys.stdout.reconfigure(write_through=True)
        sys.stderr.reconfigure(write_through=True)


def _rename(arguments: Sequence[str]) -> None:
    """What /proc says was run. Linux keeps it in this process's memory, where the nursery's own arguments left room."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    begin, end = int(fields[45]), int(fields[46])
    said = b"\0".join(os.fsencode(each) for each in arguments) + b"\0"
    ctypes.memmove(begin, said[: end - begin].ljust(end - begin, b"\0"), end - begin)


def _run(words: Sequence[str], *, is_safe: bool) -> int:
    """As `python WORDS` would. Returns the exit code."""
    what, *rest = words
    first = str(Path(what).parent) if what not in ("-m", "-c") else os.getcwd() if what == "-m" else ""
    extra = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*([] if is_safe else [first]), *extra, *_own_path]
    importlib.invalidate_caches()
    sys.orig_argv[:] = [sys.executable, *words]
    for file in [Path(entry, "sitecustomize.py") for entry in extra]:
        if file.exists():
            runpy.run_path(str(file))
    code = 0
    try:
        if what == "-m":
            sys.argv = [what, *rest[1:]]
            sys.modules.pop(rest[0], None)
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif what == "-c":
            sys.argv = ["-c", *rest[1:]]
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), vars(main))
        else:
            sys.argv = [what, *rest]
            runpy.run_path(what, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code == 1 and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code & 0xFF
