"""The server's log on stderr: lines of text, or of JSON. What others wrote cannot begin a line of its own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

from enginery.serve.engine.child import pass_on

LogFormat = Literal["text", "json"]
LEVELS: Final = ("debug", "info", "warning", "error")
_CONTROL: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)} | {10: "\\n", 13: "\\r"}
_IN_JSON: Final = {code: f"\\u{code:04x}" for code in (*range(127, 160), 0x2028, 0x2029)}  # what JSON itself leaves as it is
_engine_log: Final = logging.getLogger("enginery.engine")


def one_line(text: str) -> str:
    """The text with control characters, also line ends, as escapes."""
    return text.translate(_CONTROL)


class TextLines(logging.Formatter):
    """`2026-01-02T03:04:05.678Z INFO enginery.serve.http.access POST /v1/chat/completions ...`; tracebacks follow, indented."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, and its traceback as more lines."""
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items() if name not in ("method", "path"))
        line = one_line(f"{_time(record)} {record.levelname} {record.name} {record.getMessage()}{fields}")
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return "\n    ".join([line, *map(one_line, trace.splitlines())])


class JsonLines(logging.Formatter):
    """Each record is one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a JSON object, with its traceback as a field."""
        said = {"time": _time(record), "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        trace = {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        return msgspec.json.encode(said | trace | _fields(record)).decode().translate(_IN_JSON)


def dropped(style: LogFormat) -> Callable[[int], str]:
    """Makes the line that says how many lines are missing."""
    lines = _lines(style)
    text = "lines that were dropped here, as nobody read this in time: %d"
    return lambda count: f"{lines.format(logging.LogRecord(__name__, logging.WARNING, '', 0, text, (count,), None))}\n"


def configure(style: LogFormat, level: str) -> Callable[[str], None]:
    """Send this process's log to stderr. Returns the function that takes what the engine's process writes to its stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_lines(style))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    for name in ("uvicorn", "httpx", "httpx2", "opentelemetry"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return pass_on if style == "text" else _as_records


def _lines(style: LogFormat) -> logging.Formatter:
    return TextLines() if style == "text" else JsonLines()


def _as_records(text: str) -> None:
    for line in filter(str.strip, text.splitlines()):
        _engine_log.info("%s", line.removeprefix("engine: "))


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = record.__dict__.get("fields", {})
    return fields
