"""The process of trials: it reads the vocabulary once, and forks for each grammar a process with limits.

It has one thread, so that forking is safe, and never touches a grammar itself.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from enginery_grammar_llguidance.matching import error_of, matcher_of, tokenizer_of
from enginery_grammar_llguidance.trial import CLOCK, REQUEST, End
from enginery_grammar_llguidance.vocabulary import Vocabulary

Attempt = Callable[[str], str]
_STACK_BYTES: Final = 128 << 20  # a quarter of what the engine gives
_MEMORY_BYTES: Final = 2 << 30
_NICE: Final = 5  # below the engine's steps
_ENDS: Final[Mapping[int, End]] = {signal.SIGPROF: End.TOO_LONG, signal.SIGALRM: End.LATE, signal.SIGKILL: End.LATE}


@dataclass(frozen=True)
class _Trial:
    """A forked process, and the connection that waits for it."""

    pid: int
    connection: socket.socket


def serve(control: socket.socket, attempt: Attempt) -> None:
    """Until the control is closed. attempt: gives the error of a grammar."""
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if isinstance(key.data, _Trial):
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _tell(key.data)
                    continue
                _, handles, _, _ = socket.recv_fds(control, 1, 1)
                if not handles:
                    for other in list(selector.get_map().values()):
                        if isinstance(other.data, _Trial):
                            os.kill(other.data.pid, signal.SIGKILL)
                            other.data.connection.close()
                    return
                connection = socket.socket(fileno=handles[0])
                ended, trial = _fork(control, connection, attempt)
                selector.register(ended, selectors.EVENT_READ, trial)


def _fork(control: socket.socket, connection: socket.socket, attempt: Attempt) -> tuple[int, _Trial]:
    """Start a trial; the file descriptor can be read when it has ended."""
    ended, alive = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(ended)
            control.close()
            _try(connection, attempt)
        finally:
            os._exit(0)
    os.close(alive)
    return ended, _Trial(pid, connection)


def _tell(trial: _Trial) -> None:
    """A trial that came to its end has answered itself."""
    code = os.waitstatus_to_exitcode(os.waitpid(trial.pid, 0)[1])
    with trial.connection, suppress(OSError):  # nobody waits any more
        if code < 0:
            trial.connection.sendall(bytes([_ENDS.get(-code, End.TOO_LARGE)]))
        trial.connection.shutdown(socket.SHUT_RDWR)  # a later trial may hold it too


def _try(connection: socket.socket, attempt: Attempt) -> None:
    """In the process of one trial."""
    with connection.makefile("rb") as given:
        limit_s, size = REQUEST.unpack(given.read(REQUEST.size))
        source = given.read(size).decode()
    os.nice(_NICE)
    for timer, seconds in ((signal.ITIMER_PROF, limit_s), (signal.ITIMER_REAL, CLOCK * limit_s)):
        signal.setitimer(timer, seconds)
    threading.stack_size(_STACK_BYTES)

    def run() -> None:
        error = attempt(source).encode()
        connection.sendall(bytes([End.BAD if error else End.GOOD]) + error)

    worker = threading.Thread(target=run)
    worker.start()
    worker.join()


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the engine, whose end is ours
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdin.buffer.seek(0)
    told = json.load(sys.stdin.buffer)
    tokens = [raw.encode("latin-1") for raw in told["tokens"]]
    special_ids, ends = frozenset(told["special_ids"]), frozenset(told["eos_token_ids"])
    vocabulary = Vocabulary(tokens, special_ids=special_ids, eos_token_ids=ends, encode=lambda text: [])
    tokenizer = tokenizer_of(vocabulary)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    with socket.socket(fileno=int(sys.argv[1])) as control:
        serve(control, lambda source: error_of(matcher_of(tokenizer, source), vocabulary))


if __name__ == "__main__":
    _main()
