"""What a terminal shows from the first moment of `engine serve` until it serves, and what it says then.

On a terminal that is one line which changes; elsewhere a plain line at once and another every few seconds. Imports nothing slow.
"""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from enginery.contracts.engine import BuildProgress, EngineFacts

EVERY_S: Final = 5.0
_TEXTS: Final = {
    "process": "starting the engine's process",
    "imports": "importing what the engine needs",
    "ranks": "waiting for the other ranks",
    "weights": "reading weights",
    "pool": "allocating the KV cache",
    "warm up": "running each kind of step once, compiling what is not compiled",
    "graphs": "capturing graphs",
    "grammars": "reading the vocabulary for structured output",
}
_PARTS: Final = ("family", "weight format", "ops", "schedule policy", "drafter", "tool parser", "reasoning parser", "routes")


class StartDisplay:
    """Entered before anything slow is done. `close` may be called before the end, and more than once."""

    def __init__(self, *, every_s: float = EVERY_S) -> None:
        console = Console()
        self._every_s = every_s
        self._began_s = time.monotonic()
        self._text = "loading the plugins"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._print_lines, name="start-display", daemon=True)
        self._is_live = console.is_terminal and not console.is_dumb_terminal
        self._line = Progress(
            SpinnerColumn("line"),
            TextColumn("{task.description}", markup=False),
            BarColumn(20),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,  # the log has its own way to stderr, and keeps it
            redirect_stderr=False,
            refresh_per_second=4,
        )
        self._task = self._line.add_task(self._text, total=None)

    def __enter__(self) -> Self:
        if self._is_live:
            self._line.start()
        else:
            print(f"starting: {self._text}", flush=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Take the display away. May be called again."""
        self._closed.set()
        if self._is_live:  # where nothing was drawn, rich ends a line that nobody began
            self._line.stop()
        if self._thread.is_alive():
            self._thread.join()

    def show(self, text: str, *, done: int = 0, total: int = 0) -> None:
        """Show what is being done now. total: 0 where nobody knows how much there is."""
        self._text = text
        self._line.tasks[0].total = total or None  # which `update` cannot take back
        self._line.update(self._task, description=text, completed=done)

    def show_progress(self, progress: BuildProgress) -> None:
        """Show how far the engine's process is."""
        text = _TEXTS.get(progress.phase, f"preparing: {progress.phase}")
        done, total = progress.done_bytes, progress.total_bytes
        self.show(f"{text}, {done / 1e9:.1f} of {total / 1e9:.1f} GB" if total else text, done=done, total=total)

    @contextmanager
    def aside(self, text: str) -> Iterator[None]:
        """Show what is being done, and leave the terminal to code that draws progress of its own."""
        self.show(text)
        if self._is_live and not self._closed.is_set():
            self._line.stop()
            print(text, flush=True)
            try:
                yield
            finally:
                if not self._closed.is_set():
                    self._line.start()
        else:
            yield

    def _print_lines(self) -> None:
        while not self._closed.wait(self._every_s):
            print(f"starting, {time.monotonic() - self._began_s:.0f} s: {self._text}", flush=True)


def chosen_line(decisions: Iterable[tuple[str, str, str]]) -> str:
    """What won of each kind of plugin part but attention, in one line; why is in the debug log and at /server_info."""
    winners: dict[str, list[str]] = {}
    for setting, value, _ in decisions:
        if setting in _PARTS and value not in ("none", "off"):
            winners.setdefault(setting, []).append(value.partition(":")[0])
    return "; ".join(f"{setting} {' + '.join(winners[setting])}" for setting in _PARTS if setting in winners)


@dataclass(frozen=True, kw_only=True)
class Served:
    """What the summary tells besides an engine's facts. chats: the model has a chat template. num_ranks: of each engine."""

    url: str
    has_page: bool = False
    has_key: bool = False
    chats: bool = True
    num_engines: int = 1
    num_ranks: int = 1

    def processes(self) -> str:
        """How many there are, to go on with where each of them is; empty of one."""
        engines = f"{self.num_engines} engines" * (self.num_engines > 1)
        ranks = f"{self.num_ranks} ranks" * (self.num_ranks > 1)
        several = " of ".join(filter(None, (engines, ranks)))
        return f"{several}, each " if several else ""

    def example(self, model: str) -> str:
        """A request that is answered."""
        asked = {"messages": [{"role": "user", "content": "Hello"}]} if self.chats else {"prompt": "Hello"}
        key = '-H "Authorization: Bearer $ENGINERY_API_KEY" ' if self.has_key else ""
        path, body = "chat/completions" if self.chats else "completions", json.dumps({"model": model, **asked})
        return f"curl {self.url}/v1/{path} -H 'Content-Type: application/json' {key}-d {shlex.quote(body)}"


def summary(facts: EngineFacts, served: Served, *, seconds: float, parts: str = "") -> str:
    """What is served, where and how, in a few lines. seconds: how long the start took. parts: see `chosen_line`."""
    chosen = {setting: (value, reason) for setting, value, reason in facts.decisions}
    device, name = chosen.get("device", ("", ""))
    where = f"{served.processes()}on {device} ({name}), " if device else ""
    note = f" ({facts.note})" if facts.note else ""
    in_each = " in each engine" if served.num_engines > 1 else ""
    lines = [
        f"ready: {facts.model_name} at {served.url}, up to {facts.max_model_len:,} tokens of context{note}",
        f"  {where}{facts.dtype}; attention by {facts.attn_backend}; KV cache of {facts.num_pages * facts.page_size:,} tokens"
        f"{in_each}; started in {seconds:.1f} s",
        f"  {served.example(facts.model_name)}",
    ]
    if served.has_page:
        lines.insert(2, f"  page: {served.url}/")
    if parts:
        lines.insert(2, f"  chosen: {parts}")
    return "\n".join(lines)
