"""`python -m enginery_executor_ray.tied MODULE ARGUMENT ..` runs a module in a process that ends at once when its stdin does.

Whoever starts it keeps the other end of that pipe, so it outlives nobody, however they end: a pipe knows of no thread either.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading


def main() -> None:
    """Run the module as `python -m` does."""
    threading.Thread(target=_end_with_stdin, name="starter-watch", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
