"""What `engine doctor` looks at in this process: the machine as the server will find it. Nothing here imports torch or a plugin."""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import importlib.util
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from packaging.requirements import Requirement

from enginery.cli.flags.server import SERVER_KINDS
from enginery.cli.serve_checks import bind_error
from enginery.config.sources import engine_options
from enginery.errors import ConfigError
from enginery.plugin.loading import present_devices

_FREE_BYTES: Final = 5 << 30
_FEW_DESCRIPTORS: Final = 256
_MANY_DESCRIPTORS: Final = 4096
_ANSWER_S: Final = 2.0
_SOCKET_PATH: Final = 107  # bytes, of Linux; the server's socket is TMPDIR/enginery-XXXXXXXX/engine
_SOCKET_NAME: Final = len("/enginery-XXXXXXXX/engine")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row: what was looked at, how it is, and what to do about it."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""


def machine(port: int) -> Iterator[Check]:
    """Run every check of this module. port: where the server is to listen."""
    yield packages()
    yield settings()
    yield from folders()
    yield temporary_folder()
    yield text_encoding()
    yield descriptors()
    yield port_check(port)


def packages() -> Check:
    """Check that every package that enginery requires is here, in a version that fits."""
    wrong = []
    for required in map(Requirement, importlib.metadata.requires("enginery") or ()):
        if required.marker is not None and not required.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(required.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{required.name} is missing")
            continue
        if not required.specifier.contains(version, prereleases=True):
            wrong.append(f"{required.name} is {version}, and {required.specifier} is needed")
    if wrong:
        return Check(name="packages", status="fail", detail="; ".join(wrong), advice="Run pip install --upgrade enginery.")
    return Check(name="packages", status="ok", detail="all that enginery requires is here")


def settings() -> Check:
    """Check the variables ENGINERY_*, as `engine serve` would."""
    try:
        engine_options({}, os.environ, others=SERVER_KINDS)
    except ConfigError as error:
        return Check(name="settings", status="fail", detail=str(error), advice="Correct or unset the variable.")
    return Check(name="settings", status="ok", detail="the environment's settings are sound")


def folders() -> Iterator[Check]:
    """Check the folders of checkpoints and of kernels, which are compiled where there is a GPU."""
    from huggingface_hub.constants import HF_HUB_CACHE

    yield _folder("model cache", Path(HF_HUB_CACHE), "HF_HOME")
    if "cuda" not in present_devices():
        yield Check(name="kernel cache", status="ok", detail="not needed without a GPU")
        return
    triton, base = os.environ.get("TRITON_HOME") or Path.home(), "FLASHINFER_WORKSPACE_BASE"
    kernels = os.environ.get("TRITON_CACHE_DIR") or Path(triton) / ".triton" / "cache"
    yield _folder("kernel cache", Path(kernels), "TRITON_CACHE_DIR")
    if importlib.util.find_spec("flashinfer") is not None:
        yield _folder("FlashInfer's cache", Path(os.environ.get(base, Path.home())) / ".cache" / "flashinfer", base)


def _folder(name: str, folder: Path, variable: str) -> Check:
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    advice = f"Make it writable, or set {variable} to a folder that is."
    if not nearest.is_dir():
        return Check(name=name, status="fail", detail=f"{folder} cannot be made, because {nearest} is a file", advice=advice)
    if not os.access(nearest, os.W_OK):
        return Check(name=name, status="fail", detail=f"{folder} cannot be written: {nearest} is not writable", advice=advice)
    if (free_bytes := shutil.disk_usage(nearest).free) < _FREE_BYTES:
        advice = f"Free some, or set {variable} to a folder with more; a model of 8B in bfloat16 takes 16 GB."
        detail = f"{folder} has {free_bytes / 1e9:.1f} GB left"
        return Check(name=name, status="fail" if free_bytes < 1 << 20 else "warn", detail=detail, advice=advice)
    return Check(name=name, status="ok", detail=f"{folder}, {free_bytes / 1e9:.0f} GB free")


def temporary_folder() -> Check:
    """Check the folder where the server makes the socket to its engine."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        advice = "Set TMPDIR to a folder that can be written to, with space left."
        return Check(name="temporary folder", status="fail", detail=str(error), advice=advice)
    if (length := len(os.fsencode(folder)) + _SOCKET_NAME) > _SOCKET_PATH:
        detail = f"{folder} is too long: the socket in it would have a path of {length} bytes, and {_SOCKET_PATH} are allowed"
        return Check(name="temporary folder", status="fail", detail=detail, advice="Set TMPDIR to a shorter path, as /tmp.")
    return Check(name="temporary folder", status="ok", detail=folder)


def text_encoding() -> Check:
    """Check that file names and what is printed are UTF-8."""
    encodings = {sys.getfilesystemencoding(), sys.stdout.encoding or "utf-8"}
    if wrong := sorted(name for name in encodings if name.lower().replace("-", "") != "utf8"):
        advice = "Set LC_ALL=C.UTF-8, and unset PYTHONUTF8, PYTHONIOENCODING and PYTHONCOERCECLOCALE."
        detail = f"text is {', '.join(wrong)}, and what models say needs UTF-8"
        return Check(name="locale", status="fail", detail=detail, advice=advice)
    return Check(name="locale", status="ok", detail="UTF-8")


def descriptors() -> Check:
    """Check how many files may be open: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _MANY_DESCRIPTORS:
        return Check(name="open files", status="ok", detail=f"up to {'any number' if soft == resource.RLIM_INFINITY else soft}")
    can_raise = hard == resource.RLIM_INFINITY or hard >= _MANY_DESCRIPTORS
    advice = f"Run ulimit -n 65536 {'before engine serve' if can_raise else 'as root, or ask who runs this machine'}."
    detail = f"a process may have {soft} open files, and each connection is one"
    return Check(name="open files", status="fail" if soft < _FEW_DESCRIPTORS else "warn", detail=detail, advice=advice)


def port_check(port: int) -> Check:
    """Check that the server could listen there. One that does already is no fault of the machine."""
    error = bind_error("127.0.0.1", port)
    if error is None:
        return Check(name="port", status="ok", detail=f"port {port} is free")
    if _engine_serves(port):
        advice = "Another engine serve needs another --port."
        return Check(name="port", status="warn", detail=f"an engine serves at port {port} already", advice=advice)
    advice = "Stop what listens there, or give engine serve another --port."
    return Check(name="port", status="fail", detail=f"port {port} cannot be used: {error.strerror}", advice=advice)


def _engine_serves(port: int) -> bool:
    """Whether what listens there answers /health/live, which needs no key, as an engine does; over HTTPS it is not seen."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)) as connection:
        try:
            connection.request("GET", "/health/live")
            return connection.getresponse().read(64) == b'{"status":"live"}'
        except (OSError, http.client.HTTPException):
            return False
