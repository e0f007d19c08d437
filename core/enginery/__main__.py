"""The console command `engine`, and `python -m enginery`."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Run a command. Ctrl-C ends it with status 130, and without a traceback of what is just being imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is ignored in the background of a script
        signal.signal(signal.SIGINT, _interrupt)
    from enginery.cli.main import main as run

    run()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End at once while something is imported: torch drops an exception from the middle of numpy, and goes on with half of it."""
    within = frame
    while within is not None:
        if within.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(128 + number)
        within = within.f_back
    signal.default_int_handler(number, frame)


if __name__ == "__main__":
    main()
