"""What an engine has to do for its other ranks, and where it is decided whether there are any. Imports no torch without them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

from enginery.checkpoint.folder import find_folder, read_config
from enginery.config.resolve import check
from enginery.config.schema import EngineOptions
from enginery.contracts.parallel import ExecutorSpec, Launch, LaunchPlan, ParallelFacts, RunningRanks
from enginery.contracts.step import StepInput, StepOutput
from enginery.plugin.boundary import checked, described, inside
from enginery.plugin.registry import Registry
from enginery.worker.weights.shares import stage_of

if TYPE_CHECKING:
    from enginery.engine.ranks.driver import RankProcesses
    from enginery.worker.paths.running_step import RunningStep


class NoRanks:
    """What an engine has to do for the other ranks, where there are none."""

    def send(self, step: StepInput) -> None:
        """They begin with it. Raises `EngineDied` when one is gone."""

    def share(self, running: RunningStep) -> None:
        """Tell them what was sampled, where they need it."""

    def wait(self, running: RunningStep) -> StepOutput:
        """What a step gave, when that has come. Raises `EngineDied` when a rank is gone."""
        return running.wait()

    def landed(self, step: StepInput) -> None:
        """Its tokens are there."""

    def check(self) -> None:
        """Raises `EngineDied` when one is gone."""

    def failed(self, error: BaseException) -> None:
        """End them, for a step failed here, which they may be waiting in. Raises `EngineDied` with the first cause."""

    def end(self) -> None:
        """Tell them that nothing more comes, and wait for it."""


Ranks: TypeAlias = "NoRanks | RankProcesses"
NO_RANKS: Final = NoRanks()


def mesh_of(asked: EngineOptions) -> ParallelFacts:
    """The ranks that are asked for, as rank 0 has them."""
    layers = tuple(map(int, asked.pp_layers.split(","))) if asked.pp_layers else ()
    mesh = ParallelFacts(
        tensor_size=asked.tp, num_lanes=asked.dp_attention, num_stages=asked.pp, layers_by_stage=layers, cuts_experts=asked.ep
    )
    return mesh.of_rank(0)


def check_ranks(asked: EngineOptions, registry: Registry) -> None:
    """What the model, if its folder is here, refuses of --tp and --pp: ranks say so half a minute later. Raises `EnginError`."""
    if asked.num_ranks == 1:
        return
    model = registry.default_checkpoint().name if asked.model is None else asked.model
    if os.path.isdir(os.path.expanduser(model)) or registry.checkpoint(model) is not None:
        config = read_config(folder := find_folder(model, registry, revision=asked.revision))
        family, _ = registry.find_model(config)
        stage_of(described(family, config, f"the model in {folder}"), mesh_of(asked), family=f"family {family.name!r}")


@contextlib.contextmanager
def begun_ranks(asked: EngineOptions, registry: Registry, launch: Launch | None) -> Iterator[RankProcesses | None]:
    """Start the other ranks, which takes them seconds, and leave with all of them built. None: there are none.

    launch: instead of the executor's. What fails inside ends them. Raises the first cause.
    """
    offer = registry.named(ExecutorSpec, asked.executor, "executor")
    if asked.num_ranks <= 1:  # fewer are refused with the other options
        yield None
        return
    check(asked)
    check_ranks(asked, registry)

    def start(plan: LaunchPlan) -> RunningRanks:
        with inside(offer, "start the ranks"):
            return checked(offer, offer.spec.launch(plan), RunningRanks)

    from enginery.engine.ranks.driver import RankProcesses  # with ZeroMQ and torch.distributed, which one rank does without
    from enginery.engine.ranks.wires import wires_of
    from enginery.worker.device import devices_of_ranks

    devices = devices_of_ranks(asked, joining=offer.spec.listen is not None)
    with inside(offer, "say where ranks join"):
        wires = wires_of(asked, offer.spec)
    others = RankProcesses(asked, registry, launch=launch or start, wires=wires, devices=devices)
    try:
        yield others
        others.built()
    except BaseException as error:
        others.failed(error)
        raise
