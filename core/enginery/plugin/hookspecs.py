"""The engine scope: every hook a plugin can implement at the level of the engine. docs/hooks.md is the manual.

A hook receives only the arguments its implementation names. Except for `observe_step`, all are called while the engine starts. An
implementation is checked when its plugin is loaded (`plugin/checker.py`). What a `register_*` hook raises makes its plugin broken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import pluggy

from enginery.contracts.attention import (
    AttnBackend,
    AttnBackendSpec,
    BackendContext,
    CoordinatorContext,
    SparseCoordinator,
    SparseCoordinatorSpec,
)
from enginery.contracts.drafting import DrafterSpec
from enginery.contracts.engine import EngineHandle
from enginery.contracts.grammars import GrammarSpec
from enginery.contracts.model import CheckpointSpec, ModelSpec
from enginery.contracts.ops import OpSpec
from enginery.contracts.parallel import ExecutorSpec
from enginery.contracts.parsers import ParserSpec
from enginery.contracts.schedule import SchedulePolicySpec, StepReport
from enginery.contracts.weights import WeightFormatSpec

if TYPE_CHECKING:
    import typer
    from fastapi import APIRouter

PROJECT: Final = "enginery"
hookspec: Final = pluggy.HookspecMarker(PROJECT)
hookimpl: Final = pluggy.HookimplMarker(PROJECT)


class EngineHooks(Protocol):
    """Each process of the engine builds its own registry: a `register_*` hook runs once in every process that loads plugins."""

    @hookspec
    def register_attn_backends(self) -> list[AttnBackendSpec]:
        """The attention backends this plugin offers. Must import nothing heavy: `engine list-backends` calls it."""

    @hookspec(firstresult=True)
    def create_attn_backend(self, name: str, context: BackendContext) -> AttnBackend | None:
        """Build the backend `name` from `context`.

        Called in each worker process, once per instance, after the pools and the arena and before the model, and only on the plugin
        that registered `name`. None, or an exception, stops the start with a `PluginError` that names the plugin.
        """

    @hookspec
    def register_sparse_coordinators(self) -> list[SparseCoordinatorSpec]:
        """The sparse-KV coordinator this plugin offers: at most one, for `create_sparse_coordinator` is not told which."""

    @hookspec(firstresult=True)
    def create_sparse_coordinator(self, context: CoordinatorContext) -> SparseCoordinator | None:
        """Build this plugin's sparse-KV coordinator.

        Called in each worker process once, after the pools and before the arena and the attention backends; only on the plugin that
        registered the chosen name. None, or an exception, stops the start with a `PluginError` that names the plugin.
        """

    @hookspec
    def register_models(self) -> list[ModelSpec]:
        """The model families this plugin offers. Of several for one architecture the highest priority is taken."""

    @hookspec
    def register_checkpoints(self) -> list[CheckpointSpec]:
        """The checkpoints that ship in this plugin. The one of highest priority is the default model."""

    @hookspec
    def register_ops(self) -> list[OpSpec]:
        """The sets of faster operations this plugin offers. Each operation is taken from the highest priority that has it."""

    @hookspec
    def register_weight_formats(self) -> list[WeightFormatSpec]:
        """The packed or quantised checkpoint formats this plugin offers."""

    @hookspec
    def register_grammars(self) -> list[GrammarSpec]:
        """The compilers of structured-output grammars this plugin offers."""

    @hookspec
    def register_drafters(self) -> list[DrafterSpec]:
        """The drafters this plugin offers."""

    @hookspec
    def register_schedule_policies(self) -> list[SchedulePolicySpec]:
        """The orders among waiting requests this plugin offers. The core's own come through this hook too."""

    @hookspec
    def register_executors(self) -> list[ExecutorSpec]:
        """What places the processes of ranks. The core's own, `local`, comes through this hook too."""

    @hookspec
    def register_parsers(self) -> list[ParserSpec]:
        """The parsers of tool calls and of reasoning this plugin offers."""

    @hookspec
    def register_commands(self, app: typer.Typer) -> None:
        """Add commands to `engine`, in the CLI's process, once per invocation.

        `app` is empty and the plugin's own; its commands are merged when the hook returns. A name that is taken, or an exception,
        drops the plugin's commands with a warning.
        """

    @hookspec
    def register_routes(self, router: APIRouter, engine: EngineHandle) -> None:
        """Add HTTP routes, in the front's process, once, before it listens; only where the user named this plugin for it.

        `router` comes after the core's routes and cannot shadow them. An exception stops the start.
        """

    @hookspec
    def observe_step(self, report: StepReport) -> None:
        """See what a step did; called in the engine's process, at most once a step, after its results are on their way.

        It delays the next step by its own duration. The first exception is logged, and this plugin's observer is off from then on.
        """
