"""A trial of one grammar, in a process of its own that can be killed: what the library does with it is not bounded by its limits.

A pattern or two are enough to keep it busy for minutes, and a long chain of rules overflows the stack. What passes here, on a small
vocabulary, is compiled in the engine's process too. Run as a script, it imports nothing but the library.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

TRIAL_S: Final = 2  # of processor time; on the clock, four times that
LIMITS: Final = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
_TOO_LONG: Final = f"it takes more than {TRIAL_S} s to compile; make it simpler"
_STACK_BYTES: Final = 128 << 20  # a quarter of what the engine gives
_MEMORY_BYTES: Final = 2 << 30


def attempt(source: str) -> str:
    """Try a grammar, in the library's notation, and wait for the outcome: empty, or what is wrong with it."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__], input=source.encode(), capture_output=True, timeout=4 * TRIAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return _TOO_LONG
    if done.returncode == -signal.SIGXCPU:
        return _TOO_LONG
    return done.stdout.decode() if done.returncode == 0 else "it needs more memory or stack to compile than it may have"


def error_of(matcher: LLMatcher) -> str:
    """What is wrong with a grammar, also where nothing satisfies it or its beginning is too wide; empty if nothing is."""
    first = matcher.deep_copy()
    if not first.is_error():
        first.consume_tokens(first.compute_ff_tokens())
    if not first.is_stopped():
        first.compute_bitmask()
    return first.get_error()


class Bytes:
    """The smallest vocabulary: an end, and every byte."""

    eos_token_id = 0
    bos_token_id = None
    special_token_ids = (0,)
    tokens = (b"<end>", *(bytes([byte]) for byte in range(256)))

    def __call__(self, text: bytes) -> list[int]:
        """One token for each byte."""
        return [1 + byte for byte in text]


def _run() -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))
    sys.stdout.write(error_of(LLMatcher(tokenizer, sys.stdin.buffer.read().decode(), log_level=0, limits=LIMITS)))


def _main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_S, TRIAL_S + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    worker = threading.Thread(target=_run)
    worker.start()
    worker.join()


if __name__ == "__main__":
    _main()
