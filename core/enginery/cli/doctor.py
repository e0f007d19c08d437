"""`engine doctor`: is everything here that the engine needs, and if not, what to do. Looks, and changes nothing."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console
from rich.table import Table

from enginery import __version__
from enginery.cli.plugin_flags import JsonFlag
from enginery.plugin.discovery import Wanted, discover
from enginery.plugin.loading import present_devices

_COLOURS: Final = {"ok": "green", "warn": "yellow", "fail": "red"}

_ASK_TORCH: Final = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "devices": names}))
"""
_ASK_PLUGINS: Final = """
import json, sys
from dataclasses import asdict
from enginery.errors import EnginError
from enginery.plugin.registry import Registry
registry = Registry.load(blocked=sys.argv[1:])
try:
    model = registry.default_checkpoint()
    default = {"name": model.name, "folder": str(model.spec.folder)}
except EnginError:
    default = None
print(json.dumps({"records": [asdict(record) for record in registry.records], "default": default}))
"""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row: what was looked at, how it is, and what to do about it."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""


def doctor(
    *,
    port: Annotated[int, typer.Option(help="The port that engine serve is to use.")] = 8000,
    as_json: JsonFlag = False,
) -> None:
    """Check Python, torch, the devices, each plugin, the model cache and the port. Exits with 1 if something is wrong."""
    checks = [_python(), *_torch(), *_plugins(), _cache(), _port(port)]
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        _show(checks)
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def _show(checks: Iterable[Check]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        text = check.detail + (f"\n{check.advice}" if check.advice else "")
        table.add_row(f"[{_COLOURS[check.status]}]{check.status}[/]", check.name, text.replace("[", r"\["))
    Console(highlight=False).print(table)


def _python() -> Check:
    detail = f"Python {platform.python_version()} at {sys.executable}, enginery {__version__}"
    return Check(name="python", status="ok", detail=detail)


def _ask(code: str, *arguments: str, environ: Mapping[str, str] = os.environ) -> tuple[Any, str]:
    """What `code` prints as JSON in a process of its own, or None and why there is nothing."""
    command = [sys.executable, "-c", code, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=dict(environ))
    except subprocess.TimeoutExpired:
        return None, "it does not answer within 120 s"
    if done.returncode < 0:
        return None, f"it was killed by signal {-done.returncode}"
    if done.returncode > 0:
        return None, (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
    return json.loads(done.stdout.strip().splitlines()[-1]), ""


def _torch() -> list[Check]:
    found, why = _ask(_ASK_TORCH)
    if found is None:
        return [Check(name="torch", status="fail", detail=f"torch cannot be imported: {why}", advice="Run pip install torch.")]
    rows = [Check(name="torch", status="ok", detail=f"torch {found['version']}, CUDA {found['cuda'] or 'not built in'}")]
    if found["devices"]:
        rows.append(Check(name="devices", status="ok", detail=", ".join(found["devices"])))
    elif "cuda" in present_devices():
        advice = "Install a torch built for the driver's CUDA version; nvidia-smi shows it."
        rows.append(Check(name="devices", status="fail", detail="there is a GPU, and torch cannot use it", advice=advice))
    else:
        rows.append(Check(name="devices", status="ok", detail="CPU only"))
    return rows


def _plugins() -> list[Check]:
    environ = {name: value for name, value in os.environ.items() if name != "ENGINERY_STRICT_PLUGINS"}
    found, why = _ask(_ASK_PLUGINS, environ=environ)
    if found is None:
        return _culprits(environ, why)
    rows = []
    for record in found["records"]:
        detail = f"{record['distribution']} {record['version']} is {record['status']}"
        status: Literal["ok", "warn"] = "ok" if record["status"] == "loaded" else "warn"
        name = f"plugin {record['name']}"
        if record["status"] in ("broken", "conflict", "incompatible"):
            advice = f"Update or uninstall {record['distribution']}, or block it with -p no:{record['name']}."
            rows.append(Check(name=name, status="fail", detail=f"{detail}: {record['reason']}", advice=advice))
        else:
            rows.append(Check(name=name, status=status, detail=detail + (f": {record['reason']}" if record["reason"] else "")))
    return [*rows, _model(found["default"])]


def _culprits(environ: Mapping[str, str], why: str) -> list[Check]:
    """All plugins together bring the interpreter down: load each alone to find out which."""
    names = {found.record.name for found in discover(Wanted())}
    alone = {name: _ask(_ASK_PLUGINS, *sorted(names - {name}), environ=environ) for name in sorted(names)}
    bad = {name: reason for name, (found, reason) in alone.items() if found is None}
    rows = [
        Check(
            name=f"plugin {name}",
            status="fail",
            detail=f"importing it stops Python: {reason}",
            advice=f"Uninstall it, or block it with -p no:{name}.",
        )
        for name, reason in bad.items()
    ]
    return rows or [Check(name="plugins", status="fail", detail=f"loading all plugins fails: {why}", advice="Try --no-plugins.")]


def _model(default: Mapping[str, str] | None) -> Check:
    if default is None:
        advice = "Name a folder or a Hugging Face id with --model, or install a plugin that brings one."
        return Check(name="model", status="warn", detail="there is no default model", advice=advice)
    config = Path(default["folder"]) / "config.json"
    if not config.is_file():
        advice = "Install the plugin that brings it again."
        return Check(name="model", status="fail", detail=f"the default model {default['name']} has no {config}", advice=advice)
    return Check(name="model", status="ok", detail=f"default model {default['name']} in {default['folder']}")


def _cache() -> Check:
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not os.access(nearest, os.W_OK):
        advice = "Make it writable, or set HF_HOME to a folder that is."
        return Check(name="model cache", status="fail", detail=f"{nearest} is not writable", advice=advice)
    return Check(name="model cache", status="ok", detail=str(folder))


def _port(port: int) -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            advice = "Stop what listens there, or give engine serve another --port."
            return Check(name="port", status="fail", detail=f"port {port} cannot be used: {error.strerror}", advice=advice)
    return Check(name="port", status="ok", detail=f"port {port} is free")
