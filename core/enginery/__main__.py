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
    """End at once amid an import, as torch drops an exception out of numpy's, and amid a download, whose threads are waited for."""
    within = frame
    while within is not None:
        module = str(within.f_globals.get("__name__"))
        if within.f_code.co_filename.startswith("<frozen importlib") or module.startswith("huggingface_hub."):
            os._exit(128 + number)
        within = within.f_back
    signal.default_int_handler(number, frame)


if __name__ == "__main__":
    main()
