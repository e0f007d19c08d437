"""`engine doctor`: is everything here that the engine needs, and if not, what to do. Looks, and changes nothing."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.text import Text

from enginery import __version__
from enginery.cli.doctor_checks import Check, machine
from enginery.cli.doctor_ranks import ranks
from enginery.cli.flags.plugins import JsonFlag
from enginery.cli.tables import console, print_paragraph, print_table
from enginery.plugin.discovery import Wanted, discover
from enginery.plugin.loading import present_devices

_PLUGIN: Final = "plugin "
_OTHER_DEVICE: Final = "is no-device"
_SLOW_S: Final = 1.0
_COLOURS: Final = {"ok": "green", "warn": "yellow", "fail": "red"}

_ASK_TORCH: Final = """
import json, torch
names, why = [], ""
try:
    torch.cuda.init()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
except Exception as error:
    why = str(error).strip().split("\\n")[0]
try:
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
except AttributeError:  # built without oneDNN
    fast = True
found = {"version": torch.__version__, "cuda": torch.version.cuda, "devices": names, "why": why, "bfloat16": fast}
dist, every = torch.distributed, range(len(names))
found["gloo"] = dist.is_available() and dist.is_gloo_available()
found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_available() and dist.is_nccl_available() else ""
found["apart"] = [[i, j] for i in every for j in every if i < j and not torch.cuda.can_device_access_peer(i, j)]
print(json.dumps(found))
"""
_ASK_MODEL: Final = """
import json, sys
from enginery.checkpoint.folder import find_folder, read_config
from enginery.errors import EnginError
from enginery.plugin.registry import Registry
from enginery.checkpoint.files import scan_checkpoint
from enginery.text.tokenizer import Tokenizer
registry, rows = Registry.load(), []
def tell(name, look):
    try:
        rows.append([name, "ok", look()])
    except EnginError as error:
        rows.append([name, "fail", str(error)])
    except Exception as error:
        rows.append([name, "fail", f"{type(error).__name__}: {error}"])
    return rows[-1][1] == "ok"
def family():
    offer, why = registry.find_model(read_config(folder))
    return f"{offer.name}, from {offer.source}: {why}"
def weights():
    stored = scan_checkpoint(folder)
    return f"{len(stored):,} tensors in {len({each.file for each in stored.values()})} files"
if tell("model", lambda: str(find_folder(sys.argv[1], registry))):
    folder = find_folder(sys.argv[1], registry)
    tell("model family", family)
    tell("tokenizer", lambda: Tokenizer.from_folder(folder) and "tokenizer.json can be read")
    tell("weights", weights)
print(json.dumps(rows))
"""
_ASK_PLUGINS: Final = """
import json, sys, time
from dataclasses import asdict
from importlib.metadata import EntryPoint
from enginery.contracts.ops import OpNeeds, OpSpec
from enginery.errors import EnginError
from enginery.plugin.registry import Registry
from enginery.plugin.selection import refusals
took, load = {}, EntryPoint.load
def timed(entry_point):
    began_s, had_torch = time.perf_counter(), "torch" in sys.modules
    try:
        return load(entry_point)
    finally:
        took[entry_point.name] = [time.perf_counter() - began_s, "torch" in sys.modules and not had_torch]
EntryPoint.load = timed
registry = Registry.load(blocked=sys.argv[1:])
needs = OpNeeds(device="cpu", dtype="float32")
refused = [(offer.name, reason) for offer in registry.offers(OpSpec) for reason in refusals(offer, needs)]
lacking = [[name, reason.text] for name, reason in refused if reason.rule == "compiled"]
try:
    model = registry.default_checkpoint()
    default = {"name": model.name, "folder": str(model.spec.folder)}
except EnginError:
    default = None
records = [asdict(record) for record in registry.records]
print(json.dumps({"records": records, "default": default, "lacking": lacking, "took": took}))
"""


def doctor(
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port that engine serve is to use.")] = 8000,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Check this checkpoint too; nothing is downloaded.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check what engine serve needs: packages, devices, plugins, folders, limits, the port. Exits with 1 if something is wrong."""
    checks = [_python(), *_torch(), *_plugins(is_model_named=model is not None), *machine(port)]
    checks += [] if model is None else _named_model(model)
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        _show(checks)
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def _show(checks: Sequence[Check]) -> None:
    """Print a row for each check, one for all sound plugins, and the verdict."""
    sound = [check for check in checks if check.name.startswith(_PLUGIN) and check.status == "ok"]
    rows = [check for check in checks if check not in sound[1:]]
    if sound:
        rows[rows.index(sound[0])] = Check(name="plugins", status="ok", detail=_sound_plugins(sound))
    out = console()
    print_table(
        out,
        [
            {
                "status": Text(check.status, style=_COLOURS[check.status]),
                "name": check.name,
                "detail": "\n".join(filter(None, (check.detail, check.advice))),
            }
            for check in rows
        ],
        has_head=False,
    )
    out.print()
    print_paragraph(out, _verdict(rows))


def _sound_plugins(checks: Sequence[Check]) -> str:
    other = [check.name.removeprefix(_PLUGIN) for check in checks if _OTHER_DEVICE in check.detail]
    text = f"{len(checks) - len(other)} are loaded, as engine plugins shows"
    return f"{text}; for other devices than this machine's: {', '.join(other)}" if other else text


def _verdict(checks: Sequence[Check]) -> str:
    """The last line: how many of the rows above fail or warn, and what to do."""
    failures, warnings = (sum(check.status == status for check in checks) for status in ("fail", "warn"))
    if not failures and not warnings:
        return f"All is well: {len(checks)} checks, nothing to mend."
    counts = f"{len(checks)} checks, {_count(failures, 'failure')}, {_count(warnings, 'warning')}."
    if failures:
        return f"Not ready: {counts} Mend what says fail, then run engine doctor again."
    return f"Ready: {counts} What says warn can stay as it is."


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


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
        built = f"is built for CUDA {found['cuda']}" if found["cuda"] else "is built without CUDA"
        detail = f"there is a GPU, and torch, which {built}, cannot use it: {found['why'] or 'it finds no device'}"
        advice = "Install a torch for the CUDA version that nvidia-smi shows, or a newer driver."
        rows.append(Check(name="devices", status="fail", detail=detail, advice=advice))
    else:
        slow = "; it has no instructions for bfloat16 (AVX-512), in which prompts are slower than in float32"
        rows.append(Check(name="devices", status="ok", detail="CPU only" + ("" if found.get("bfloat16", True) else slow)))
    return [*rows, *ranks(len(found["devices"]), gloo=found["gloo"], nccl=found["nccl"], apart=found["apart"])]


def _plugins(*, is_model_named: bool) -> list[Check]:
    environ = _environ()
    found, why = _ask(_ASK_PLUGINS, environ=environ)
    if found is None:
        return _culprits(environ, why)
    rows = []
    for record in found["records"]:
        detail = f"{record['distribution']} {record['version']} is {record['status']}"
        status: Literal["ok", "warn"] = "ok" if record["status"] in ("loaded", "no-device") else "warn"
        name = f"{_PLUGIN}{record['name']}"
        if record["status"] in ("broken", "conflict", "incompatible"):
            advice = f"Update or uninstall {record['distribution']}, or block it with -p no:{record['name']}."
            rows.append(Check(name=name, status="fail", detail=f"{detail}: {record['reason']}", advice=advice))
        else:
            rows.append(Check(name=name, status=status, detail=detail + (f": {record['reason']}" if record["reason"] else "")))
    rows += _slow_imports(found.get("took", {}))
    if "cuda" not in present_devices():
        rows += [Check(name=f"operations {name}", status="warn", detail=text) for name, text in found.get("lacking", ())]
    return rows if is_model_named else [*rows, _default_model(found["default"])]


def _slow_imports(took: Mapping[str, tuple[float, bool]]) -> list[Check]:
    """Of plugins: what every command waits for. took: by name, how long importing it took, and whether it brought torch."""
    rows = []
    for name, (seconds, brings_torch) in took.items():
        if seconds > _SLOW_S or brings_torch:
            what = f"{seconds:.1f} s and brings torch" if brings_torch else f"{seconds:.1f} s"
            detail = f"importing it takes {what}, and every command of engine imports it"
            advice = "In the plugin, import what is heavy inside the function that builds."
            rows.append(Check(name=f"import of {name}", status="warn", detail=detail, advice=advice))
    return rows


def _environ() -> dict[str, str]:
    """The environment without the variable that makes the first broken plugin an error."""
    return {name: value for name, value in os.environ.items() if name != "ENGINERY_STRICT_PLUGINS"}


def _culprits(environ: Mapping[str, str], why: str) -> list[Check]:
    """All plugins together bring the interpreter down: load each alone to find out which."""
    names = {found.record.name for found in discover(Wanted())}
    alone = {name: _ask(_ASK_PLUGINS, *sorted(names - {name}), environ=environ) for name in sorted(names)}
    bad = {name: reason for name, (found, reason) in alone.items() if found is None}
    rows = [
        Check(
            name=f"{_PLUGIN}{name}",
            status="fail",
            detail=f"importing it stops Python: {reason}",
            advice=f"Uninstall it, or block it with -p no:{name}.",
        )
        for name, reason in bad.items()
    ]
    return rows or [Check(name="plugins", status="fail", detail=f"loading all plugins fails: {why}", advice="Try --no-plugins.")]


def _default_model(default: Mapping[str, str] | None) -> Check:
    if default is None:
        advice = "Name a folder or a Hugging Face id with --model, or install a plugin that brings one."
        return Check(name="model", status="warn", detail="there is no default model", advice=advice)
    config = Path(default["folder"]) / "config.json"
    if not config.is_file():
        advice = "Install the plugin that brings it again."
        return Check(name="model", status="fail", detail=f"the default model {default['name']} has no {config}", advice=advice)
    return Check(name="model", status="ok", detail=f"default model {default['name']} in {default['folder']}")


def _named_model(model: str) -> list[Check]:
    rows, why = _ask(_ASK_MODEL, model, environ={**_environ(), "HF_HUB_OFFLINE": "1"})
    if rows is None:
        return [Check(name="model", status="fail", detail=f"looking at it stops Python: {why}", advice="See the plugins above.")]
    return [Check(name=name, status=status, detail=detail) for name, status, detail in rows]
