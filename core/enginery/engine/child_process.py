"""How a process that another one has started ends with it, however that died."""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends, even in a device call. Elsewhere a watch on stdin must."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
