"""`engine list-backends`: the attention backends on offer, and why each one would or would not serve a model."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Final

import typer
from rich.text import Text

from enginery.checkpoint.folder import find_folder, read_config, with_dtype
from enginery.cli.flags.plugins import BlockFlags, JsonFlag, NoPluginsFlag, load_registry
from enginery.cli.plugins import COLOURS, print_reasons
from enginery.cli.tables import Row, console, print_paragraph, print_table
from enginery.config.resolve import DeviceFacts, resolve
from enginery.config.schema import EngineOptions
from enginery.contracts.attention import AttnBackendSpec, AttnNeeds
from enginery.contracts.ops import OpNeeds, OpSpec
from enginery.errors import ConfigError
from enginery.plugin.boundary import described
from enginery.plugin.loading import present_devices
from enginery.plugin.records import Offer, Status
from enginery.plugin.registry import Registry
from enginery.plugin.selection import Candidate, ranked, weigh, weigh_ops
from enginery.worker.needs import LayerNeeds, by_phase

_KINDS: Final = {
    "softmax": "softmax attention layers",
    "prefill": "softmax attention layers, in prefills",
    "decode": "softmax attention layers, decoding",
    "single": "softmax attention layers, decoding one request",
    "recurrent": "recurrent attention layers",
}


def list_backends(
    *,
    why: Annotated[
        str | None, typer.Option("--why", metavar="MODEL", help="Say what each would refuse of MODEL, and which one auto takes.")
    ] = None,
    device: Annotated[str, typer.Option(help="With --why: the device to ask for, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="With --why: the dtype to ask for.")] = "auto",
    page_size: Annotated[int, typer.Option(help="With --why: the page size to ask for.")] = EngineOptions.page_size,
    as_json: JsonFlag = False,
    block: BlockFlags = None,
    no_plugins: NoPluginsFlag = False,
) -> None:
    """Show the attention backends on offer. With --why MODEL, exits with 1 if none of them serves the model."""
    registry = load_registry(block, no_plugins=no_plugins)
    asked = EngineOptions(model=why, device=device, dtype=dtype, page_size=page_size)
    if why is None and asked != EngineOptions():
        raise ConfigError("--device, --dtype and --page-size are asked for a model; name it with --why MODEL, or leave them out")
    candidates, ops = dict[str, tuple[Candidate, ...]](), list[str]()
    if why is not None:
        layers, op_needs = _asking(why, asked, registry)
        candidates, ops = _weigh(layers, registry), weigh_ops(op_needs, registry.offers(OpSpec))
    if as_json:
        print(json.dumps(_as_data(registry, candidates) | ({} if why is None else {"ops": ops}), indent=2))
    else:
        _show(registry, candidates, ops)
    if not all(any(candidate.chosen for candidate in weighed) for weighed in candidates.values()):
        raise typer.Exit(1)


def _weigh(layers: Mapping[str, AttnNeeds], registry: Registry) -> dict[str, tuple[Candidate, ...]]:
    """The candidates for each kind of layer. Softmax layers have a list for each phase if `auto` takes two backends for them, and
    one for decoding one request if it takes another for that."""
    weighed: dict[str, tuple[Candidate, ...]] = {}
    backends = registry.offers(AttnBackendSpec)
    for kind, needs in layers.items():
        if kind == "recurrent":
            weighed[kind] = weigh(needs, backends)
            continue
        phases = {role: weigh(part, backends) for role, part in by_phase(needs).items()}
        best = {role: next((found.name for found in each if found.chosen), None) for role, each in phases.items()}
        single = {"single": phases.pop("single")}
        weighed |= {kind: weigh(needs, backends)} if best["prefill"] == best["decode"] else phases
        weighed |= single if best["single"] != best["decode"] else {}
    return weighed


def _asking(model: str, asked: EngineOptions, registry: Registry) -> tuple[dict[str, AttnNeeds], OpNeeds]:
    """What the model needs of attention backends, by kind of layer, and of operations."""
    device = asked.device if asked.device != "auto" else "cuda" if "cuda" in present_devices() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device is {device!r}, but must be auto, cpu or cuda")
    folder = find_folder(model, registry)
    config = with_dtype(read_config(folder), folder)
    family, _ = registry.find_model(config)
    facts = described(family, config, f"the model {model}")
    capability = _compute_capability() if device == "cuda" else None
    where = DeviceFacts(kind=device, name=device, available_bytes=0, num_threads=1, compute_capability=capability)
    if device == "cpu" and asked.dtype == "auto":
        from enginery.worker.device import device_facts  # imports torch, which knows if this CPU is fast in bfloat16

        where = device_facts("cpu", None)
    settings = resolve(asked, where, facts, config=config)
    needs = LayerNeeds.of(facts.layers, settings, where)._asdict()
    layers = {kind: each for kind, each in needs.items() if each.layers}
    return layers, OpNeeds(device=device, dtype=settings.dtype, compute_capability=capability)


def _compute_capability() -> tuple[int, int] | None:
    """The first CUDA device's, from the driver's own tool, because torch takes seconds to import."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    command = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    major, dot, minor = done.stdout.partition("\n")[0].strip().partition(".")
    return (int(major), int(minor)) if dot and major.isdigit() and minor.isdigit() else None


def _as_data(registry: Registry, candidates: Mapping[str, Sequence[Candidate]]) -> dict[str, object]:
    backends = []
    for offer in ranked(registry.offers(AttnBackendSpec)):
        row: dict[str, object] = {
            "name": offer.name,
            "plugin": offer.plugin,
            "distribution": offer.distribution,
            "version": offer.version,
            "status": _status(registry, offer),
            "priority": offer.spec.priority,
            "api": list(offer.spec.api),
            "devices": sorted(offer.spec.capabilities.devices),
            "dtypes": sorted(offer.spec.capabilities.dtypes),
            "summary": offer.spec.summary,
        }
        for kind, weighed in candidates.items():
            row[kind] = next(
                {"chosen": candidate.chosen, "reasons": [asdict(reason) for reason in candidate.reasons]}
                for candidate in weighed
                if candidate.name == offer.name
            )
        backends.append(row)
    return {"backends": backends, "absent_plugins": [asdict(record) for record in registry.records if not record.is_live]}


def _status(registry: Registry, offer: Offer[AttnBackendSpec]) -> Status:
    return next(record.status for record in registry.records if record.is_live and record.name == offer.plugin)


def _show(registry: Registry, candidates: Mapping[str, Sequence[Candidate]], ops: Sequence[str]) -> None:
    out = console()
    rows: list[Row] = [
        {
            "backend": offer.name,
            "status": Text(status := _status(registry, offer), style=COLOURS[status]),
            "priority": str(offer.spec.priority),
            "devices": " ".join(sorted(offer.spec.capabilities.devices)),
            "dtypes": " ".join(sorted(offer.spec.capabilities.dtypes)),
            "distribution": f"{offer.distribution} {offer.version}",
            "summary": offer.spec.summary,
        }
        for offer in ranked(registry.offers(AttnBackendSpec))
    ]
    print_table(out, rows, right=["priority"])
    if not registry.offers(AttnBackendSpec):
        out.print("There is no attention backend; install a plugin that offers one.")
    print_reasons(out, [record for record in registry.records if not record.is_live])
    for kind, weighed in candidates.items():
        out.print(f"\nfor {_KINDS[kind]}:")
        for candidate in weighed:
            print_paragraph(out, ("-> " if candidate.chosen else "   ") + str(candidate))
    if ops:
        out.print("\nfor operations, each from the first that gives it:")
    for line in ops:
        print_paragraph(out, f"   {line}")
