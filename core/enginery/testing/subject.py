"""The backend under test, on one device."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from enginery.contracts.attention import AttnBackend, AttnBackendSpec, AttnNeeds, BackendContext, Capabilities
from enginery.contracts.latent import PrefillStrategy
from enginery.contracts.versions import HookGroup
from enginery.errors import Unsupported
from enginery.plugin.manifest import Manifest
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery.plugin.selection import refusals
from enginery.testing.cases import AttnCase, Kind, Row, claimed_kinds, covering

Factory = Callable[[BackendContext], AttnBackend]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """From what another process finds a subject again. name: of the backend; `module:NAME` where no manifest brings it."""

    name: str
    manifest: Manifest | None


@dataclass(frozen=True, kw_only=True)
class ChildTask:
    """What another process is to build and run. path: its `sys.path`."""

    origin: Origin
    device: str
    path: list[str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """What is tested. options: given to every context."""

    offer: Offer[AttnBackendSpec]
    create: Factory
    device: torch.device
    options: object | None
    origin: Origin

    @classmethod
    def installed(cls, name: str, registry: Registry, *, device: str) -> Subject:
        """Backend `name`, built by its plugin. Raises `PluginError` for an unknown name, `Unsupported` for a device not claimed."""
        create = functools.partial(registry.create_attn_backend, name)
        manifest = dataclasses.replace(registry.manifest, absent=())
        found = cls(
            offer=registry.named(AttnBackendSpec, name, "attention backend"),
            create=create,
            device=torch.device(device),
            options=registry.options_for(name),
            origin=Origin(name=name, manifest=manifest),
        )
        return found._on_its_device()

    @classmethod
    def imported(cls, path: str, *, device: str) -> Subject:
        """The pair (spec, factory) at `module:NAME`: a backend that no plugin offers yet."""
        module, _, name = path.partition(":")
        spec, create = vars(importlib.import_module(module))[name]
        offer = Offer(spec=spec, group=HookGroup.ATTN_BACKEND, name=spec.name, plugin=path, distribution=module, version="0")
        options = None if spec.options is None else spec.options()
        found = cls(
            offer=offer, create=create, device=torch.device(device), options=options, origin=Origin(name=path, manifest=None)
        )
        return found._on_its_device()

    @classmethod
    def again(cls, origin: Origin, *, device: str) -> Subject:
        """The same subject in another process."""
        if origin.manifest is None:
            return cls.imported(origin.name, device=device)
        return cls.installed(origin.name, Registry.replay(origin.manifest), device=device)

    def _on_its_device(self) -> Subject:
        devices = self.can.devices
        if self.device.type not in devices:
            raise Unsupported(
                f"{self.offer.name} is for {', '.join(sorted(devices))}, not for {self.device.type}; give another device"
            )
        return self

    @property
    def can(self) -> Capabilities:
        """What the backend claims."""
        return self.offer.spec.capabilities

    def needs(self, case: AttnCase) -> AttnNeeds:
        """What a model with this layer asks of it."""
        return AttnNeeds(
            device=self.device.type,
            dtype=case.dtype,
            kv_dtype=case.dtype,
            page_size=case.page_size,
            layers=(case.facts,),
            phases=self.can.phases,
            compute_capability=torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None,
            mla_ragged=case.is_ragged,
        )

    @functools.cached_property
    def served(self) -> list[tuple[Kind, Mapping[Row, AttnCase]]]:
        """Of each kind of layer that it claims, every combination that it does not refuse."""
        return [
            (kind, {row: case for row, case in kind.rows() if not refusals(self.offer, self.needs(case))})
            for kind in claimed_kinds(self.can)
        ]

    @functools.cached_property
    def covering(self) -> list[AttnCase]:
        """Served cases in which any two values meet that meet in a served case."""
        return [cases[row] for _, cases in self.served for row in covering(list(cases))]

    @functools.cached_property
    def usual(self) -> list[AttnCase]:
        """Per kind and strategy the first served case, and of softmax attention the one with the most features."""
        found: dict[object, AttnCase] = {}
        for kind, cases in self.served:
            for case in cases.values():
                found.setdefault((kind.name, case.strategy), case)
            if kind.name == "softmax" and cases:
                found[kind.name] = max(cases.values(), key=lambda case: case.num_features)
        return list(dict.fromkeys(found.values()))


def covering_cases(subject: Subject) -> list[AttnCase]:
    """The cases in which any two claimed values meet, for the rule about numbers."""
    return subject.covering


def usual_cases(subject: Subject) -> list[AttnCase]:
    """Per kind and strategy the usual one, and of softmax attention the one with the most features."""
    return subject.usual


def leaf_cases(subject: Subject) -> list[AttnCase]:
    """The usual cases without a composite around the backend."""
    return [case for case in usual_cases(subject) if case.strategy is None]


def wrapped_cases(subject: Subject) -> list[AttnCase]:
    """The usual cases as a model sees them: MLA with a strategy."""
    return [case for case in usual_cases(subject) if case.facts.latent is None or case.strategy is not None]


def tree_cases(subject: Subject) -> list[AttnCase]:
    """The usual cases as a model sees them, of layers that drafts may branch in: without windows and states."""
    cases = [case for case in wrapped_cases(subject) if case.facts.recurrent is None]
    return list(dict.fromkeys(replace(case, facts=replace(case.facts, sliding_window=None)) for case in cases))


def first_case(subject: Subject) -> list[AttnCase]:
    """One of the usual cases."""
    return usual_cases(subject)[:1]


def the_whole(subject: Subject) -> list[None]:
    """The scope of a rule that is about no one case."""
    return [None]


def mla_cases(strategy: PrefillStrategy) -> Callable[[Subject], list[AttnCase]]:
    """The usual one of that strategy."""
    return lambda subject: [case for case in usual_cases(subject) if case.strategy is strategy]
