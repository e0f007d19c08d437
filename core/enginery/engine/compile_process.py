"""Compiling attention kernels in a process of its own: `python -m enginery.engine.compile_process`, with its order on stdin.

It is nice, so that an engine beside it keeps its cores, and it ends with whoever started it, compilers included: they are in its
process group, which it kills when its stdin ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Final

import msgspec

from enginery.child_process import read_frame, write_frame
from enginery.contracts.attention import AttnBackendSpec, AttnNeeds
from enginery.errors import EnginError, Unsupported
from enginery.plugin.boundary import inside
from enginery.plugin.manifest import Manifest
from enginery.plugin.registry import Registry

_NICENESS: Final = 15
_SHOWN_LINES: Final = 20


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to compile: backends, each with what it is needed for."""

    manifest: Manifest
    wanted: tuple[tuple[str, AttnNeeds], ...]


class CompileProcess:
    """A process that compiles kernels. It ends with this process, and `stop` ends it sooner."""

    def __init__(self, registry: Registry, wanted: Sequence[tuple[str, AttnNeeds]]) -> None:
        order = msgspec.msgpack.encode(Order(manifest=registry.manifest, wanted=tuple(wanted)))
        command, pipe, nowhere = [sys.executable, "-m", __name__], subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=nowhere, stderr=pipe, start_new_session=True)
        write_frame(self._process.stdin, order)

    def wait(self) -> None:
        """Until all is compiled. Raises `Unsupported` with the process' last words if it fails."""
        stderr = self._process.stderr
        assert stderr is not None
        with self._process:  # closes its pipes
            said = stderr.read().decode(errors="replace")
        if status := self._process.returncode:
            last = "\n".join(said.strip().splitlines()[-_SHOWN_LINES:]) or "it says nothing"
            raise Unsupported(f"compiling ended with exit status {status}: {last}")

    def stop(self) -> None:
        """End it, and its compilers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def compile_kernels(registry: Registry, wanted: Sequence[tuple[str, AttnNeeds]]) -> None:
    """Compile here and now. Raises `Unsupported`, and `PluginError` that names the plugin."""
    for name, needs in wanted:
        offer = registry.named(AttnBackendSpec, name, "attention backend")
        store = offer.spec.kernel_store
        assert store is not None, "only backends with a store have kernels to compile"
        with inside(offer, f"compile the kernels of {name!r}"):
            store.compile(needs, registry.options_for(name))


def _end_with_parent(stdin: IO[bytes]) -> None:
    while stdin.read(4096):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    os.nice(_NICENESS)
    stdin = sys.stdin.buffer
    order = msgspec.msgpack.decode(read_frame(stdin) or b"", type=Order)
    threading.Thread(target=_end_with_parent, args=(stdin,), name="parent-watch", daemon=True).start()
    try:
        compile_kernels(Registry.replay(order.manifest), order.wanted)
    except EnginError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())  # the watch on stdin would hold the interpreter's end up
