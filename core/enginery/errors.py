"""Every error a user or a plugin author can cause. Each says what happened, why, and what to do.

Anything that is not an `EnginError` is a bug of ours or of a plugin; it stops the engine and is shown with its traceback.
"""

from __future__ import annotations

from typing import Final


class EnginError(Exception):
    """The parent of all errors that are printed without a traceback.

    The CLI prints `str(error)` and exits with `exit_code`.
    """

    exit_code: int = 1


FAULTS: Final = (Exception, SystemExit)  # of a plugin's code, which must end the process no more than the code of a request


class ConfigError(EnginError):
    """A flag, an environment variable or a key of the configuration file is wrong."""

    exit_code = 2


class PluginError(EnginError):
    """A plugin cannot be found, loaded, checked or chosen. The message names it and its distribution."""

    exit_code = 2


class Unsupported(PluginError):
    """What was asked for by name refuses the model, the device or the settings. Carries every reason."""


class CheckpointError(EnginError):
    """A checkpoint is incomplete, damaged or of an unknown architecture. The message names the file and the tensor."""

    exit_code = 2


class OutOfMemory(EnginError):
    """The memory plan does not fit, or the system refuses the memory. The message names the flag to change."""

    exit_code = 2


class StalePlan(EnginError):
    """`attend` was given a batch that its plan does not cover."""


class EngineDied(EnginError):
    """The engine process ended; the message carries its root cause."""


class RequestError(EnginError):
    """One request cannot be served; nobody else's is affected.

    `param` is the name of the offending field, where there is one. Served as HTTP 400.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFull(RequestError):
    """The waiting queue is at its bound. Served as HTTP 429 with `Retry-After`."""


class Overloaded(RequestError):
    """The request could be served, but what it needs is in use for too long. Served as HTTP 503 with `Retry-After`."""
