"""The process that tries grammars: how it ends, and what is said of a trial that is late."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from enginery.api import Grammar, GrammarKind, GrammarTokens, Overloaded, UnfinishedGrammar
from enginery_grammar_llguidance.compiler import Compiled, Compiler
from enginery_grammar_llguidance.trial import End, Outcome, Trials

TOKENS = GrammarTokens(
    tokens=(b"<end>", *(bytes([byte]) for byte in range(256))),
    special_ids=frozenset({0}),
    eos_token_ids=frozenset({0}),
    encode=lambda text: [1 + byte for byte in text.encode()],
)


def test_a_process_of_trials_that_dies_is_started_again() -> None:
    made = Compiler(TOKENS)
    grammar = Grammar(kind=GrammarKind.REGEX, source="ab")
    made.compile(grammar)
    died = made._trials._server.process
    died.kill()
    died.wait()
    found = made.compile(grammar)
    assert isinstance(found.finish() if isinstance(found, UnfinishedGrammar) else found, Compiled)
    assert made._trials._server.process is not died


def test_a_trial_that_is_late_by_the_clock_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Compiler(TOKENS)
    monkeypatch.setattr(Trials, "attempt", lambda *asked: Outcome(End.LATE))
    found = made.compile(Grammar(kind=GrammarKind.REGEX, source="ab"))
    assert isinstance(found, UnfinishedGrammar)
    with pytest.raises(Overloaded, match="too busy"):
        found.finish()


def test_the_process_of_trials_ends_with_its_compiler() -> None:
    made = Compiler(TOKENS)
    process = made._trials._server.process
    made.compile(Grammar(kind=GrammarKind.REGEX, source="ab"))
    assert process.poll() is None
    del made
    gc.collect()
    assert process.poll() == 0


@pytest.mark.parametrize("busy", [False, True])
def test_the_process_of_trials_leaves_no_socket_open(
    busy: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    made = Compiler(TOKENS)
    server = made._trials._server
    made.compile(Grammar(kind=GrammarKind.REGEX, source="ab"))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if busy:  # a trial that waits for its grammar
            server.take(theirs)
            children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
            while not children.read_text():
                time.sleep(0.005)
        del made, server
        gc.collect()
    assert capfd.readouterr().err == ""


def test_a_trial_that_a_signal_without_a_name_ends_leaves_the_process() -> None:
    made = Compiler(TOKENS)
    server = made._trials._server
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server.take(theirs)
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        while not (found := children.read_text()):
            time.sleep(0.005)
        os.kill(int(found), 40)
        theirs.close()
        assert ours.recv(2) == bytes([End.TOO_LARGE])
    assert server.process.poll() is None


def test_a_trial_whose_parent_is_killed_answers_all_the_same() -> None:
    made = Compiler(TOKENS)
    process = made._trials._server.process
    hard = Grammar(kind=GrammarKind.JSON_SCHEMA, source='{"type": "integer", "multipleOf": 1000003}')
    worker = threading.Thread(target=made.compile, args=[hard])
    worker.start()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while worker.is_alive() and not children.read_text():
        time.sleep(0.005)
    process.kill()
    worker.join(50)
    assert not worker.is_alive(), "the connection stays open until the trial ends, which its limits see to"
