"""Where the ranks of one engine meet while they are built: they compare what each has chosen, and agree on the memory."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec
import torch

from enginery import __version__
from enginery.contracts.model import Model
from enginery.contracts.ops import OpTable
from enginery.contracts.parallel import Collectives, ParallelFacts
from enginery.errors import ConfigError, Unsupported
from enginery.worker.choice import Checkpoint, Choice
from enginery.worker.memory_plan import MemoryPlan
from enginery.worker.paths.captured_step import Capture
from enginery.worker.paths.cuda_capture import CudaCapture
from enginery.worker.ranks.collectives import HeadColumns, JoinedHead, Met, RankCollectives
from enginery.worker.ranks.gloo import LOOPBACK, Group, MeetingStore, Standing
from enginery.worker.ranks.lanes import LaneRows
from enginery.worker.ranks.nccl import DeviceGroup, TensorGroup
from enginery.worker.ranks.peers import Peers, bind_peer_ops
from enginery.worker.ranks.stages import LinkedStage, neighbours
from enginery.worker.weights.shares import stage_of

_SOME_BYTES: Final = 4096


class RankGroups(Met):
    """The groups that one rank is in. All make them in one order. Raises `LostRank` where one does not come.

    tensor: the ranks of its lane that have a part of each layer. everyone: those of all lanes, of its stage. world: all, for what
    is in host memory.
    """

    def __init__(
        self, store: MeetingStore, parallel: ParallelFacts, *, host: str, standing: Standing, device: torch.device = Group.device
    ) -> None:
        """store: through which they find each other. host: address of the first rank. device: of this rank's tensors."""
        self._graphs: Iterable[torch.cuda.CUDAGraph] = ()
        self.parallel, self._store, self._standing, self._is_one_host = parallel, store, standing, host == LOOPBACK
        of_host = functools.partial(Group, store, standing=standing, host=host)
        self.world = of_host("all", rank=parallel.rank, size=parallel.num_ranks)
        make: Callable[..., TensorGroup] = of_host
        if device.type != "cpu":
            make = functools.partial(DeviceGroup, store, standing=standing, device=device)
        stage, over_lanes = f"stage {parallel.stage}", parallel.over_lanes()
        self.everyone = self.tensor = make(stage, rank=over_lanes.tensor_rank, size=over_lanes.tensor_size)
        self._across: TensorGroup | None = None
        if parallel.num_lanes > 1:
            self._across = make(f"{stage}, tensor rank {parallel.tensor_rank}", rank=parallel.lane, size=parallel.num_lanes)
            self.tensor = make(f"{stage}, lane {parallel.lane}", rank=parallel.tensor_rank, size=parallel.tensor_size)
        self._stages: TensorGroup | None = None
        self._staged: LinkedStage | None = None
        self._beside = self.world
        if parallel.num_stages > 1:
            self._stages = make("stages", rank=parallel.rank, size=parallel.num_ranks)
            if isinstance(self._stages, DeviceGroup):
                self._beside = of_host(f"{stage}, hosts", rank=over_lanes.tensor_rank, size=over_lanes.tensor_size)
                _connect(self._stages, parallel)

    def close(self, *, severed: bool = False) -> None:
        """When this rank runs no more steps. Groups of host memory end with their last owner. severed: others end already."""
        for graph in list(self._graphs):
            graph.reset()  # NCCL waits for the end of graphs that have its exchanges
        for group in () if severed else {self.everyone, self.tensor, self._across, self._stages}:
            if isinstance(group, DeviceGroup):
                group.close()

    def together(self) -> None:
        self._beside.smallest([0])

    def outside(self, capture: CudaCapture) -> Capture:
        self._graphs = capture.graphs
        if self._staged is None:
            return capture
        self.world.smallest([0])  # what crossed in the first steps has arrived, so nothing is on its way while anyone captures
        return self._staged.outside(capture)

    def compare(self, choice: Choice, *, what: str = "ranks") -> None:
        """Raise `ConfigError` on every rank where one differs from the first, before weights are read."""
        texts = self.world.texts(msgspec.json.encode(_stated(choice)).decode())
        found = [msgspec.json.decode(text, type=dict[str, str]) for text in texts]
        problems = [
            f"{name} is {other.get(name)} on rank {rank}, and {value} on rank 0"
            for rank, other in enumerate(found)
            for name, value in found[0].items()
            if other.get(name) != value
        ]
        if problems:
            raise ConfigError("\n  - ".join([f"the {what} of this engine are not alike:", *problems]))

    def smallest(self, memory: MemoryPlan) -> MemoryPlan:
        """One without layers of a kind has room for any."""
        most = 2**62
        counts = (memory.num_pages, memory.window_pages or most, memory.state_pages or most)
        num_pages, window_pages, state_pages = (count % most for count in self.world.smallest(counts))
        return dataclasses.replace(memory, num_pages=num_pages, window_pages=window_pages, state_pages=state_pages)

    def collectives(self, ops: OpTable, choice: Choice) -> RankCollectives:
        """Among the ranks of the stage. On GPUs of one host that reach each other's memory, with sums in the norms behind them."""
        peer_ops = None
        if self._is_one_host and self.tensor.device.type != "cpu" and self.parallel.num_lanes == 1 < self.tensor.size:
            peers = Peers(self._store, self.world, self.parallel, self.tensor.device)
            peer_ops = bind_peer_ops(choice.ops, peers, self._standing)
        head = HeadColumns(self.everyone, choice.facts.vocab_size, peer_ops)
        return RankCollectives(self.tensor, self._across, ops, head, peer_ops)

    def joined(self, model: Model, choice: Choice, comm: Collectives) -> tuple[Model, JoinedHead | None]:
        """With what crosses between stages, and the logits of the last stage's ranks."""
        if self._stages is not None:
            boundary, dtype = choice.facts.boundary, choice.dtype
            model = self._staged = LinkedStage(model, self._stages, self.parallel, boundary, dtype, host=self.world)
        if self.everyone.size == 1 or not self.parallel.is_last_stage:
            return model, None
        assert isinstance(comm, RankCollectives), "they are this rank's"
        exchanges = [group for group in (self.tensor, self._across) if isinstance(group, Group)]
        lanes = None if self._across is None else LaneRows(self._across)
        return model, JoinedHead(model, comm.head, choice.results, lanes, exchanges)


def _connect(stages: DeviceGroup, parallel: ParallelFacts) -> None:
    """NCCL connects two ranks at their first exchange, and one that waits there for another that broke could not be ended."""
    before, behind = neighbours(parallel)
    token = torch.zeros(1, device=stages.device)
    if parallel.stage > 0:
        token = stages.receive((1,), token.dtype, before)
    if not parallel.is_last_stage:
        stages.send(token, behind)
    torch.cuda.synchronize(stages.device)


def refuse_for_ranks(choice: Choice) -> None:
    """Raise `Unsupported` for what several ranks do not run yet."""
    if choice.drafter is not None and choice.parallel.num_stages > 1:
        raise Unsupported(
            f"--drafter {choice.drafter.name} guesses what follows the last tokens, and with --pp {choice.parallel.num_stages} "
            "steps are on their way before these are known; leave one of them out"
        )
    if choice.parallel.num_lanes > 1 and not choice.family.spec.lanes:
        raise Unsupported(
            f"the family {choice.family.name}, from {choice.family.source}, does not run in lanes; leave --dp-attention out"
        )
    if not stage_of(choice.facts, choice.parallel).memory:
        raise Unsupported(
            f"stage {choice.parallel.stage} has no layer with attention or a state; divide the layers otherwise, by --pp-layers"
        )


def _stated(choice: Choice) -> Mapping[str, str]:
    """What has to be the same on all ranks."""
    settings = {name: str(value) for name, value in vars(choice.settings).items() if name != "decisions"}
    chosen = {
        "enginery": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "checkpoint": _fingerprint(choice.checkpoint),
        "family": choice.family.source,
        "vocabulary": str(choice.facts.vocab_size),
        "operations": ", ".join(offer.source for offer in choice.ops),
        "weight format": "plain" if choice.weight_format is None else choice.weight_format.source,
        "device": choice.device_facts.kind,
        "drafter": "off" if choice.drafter is None else choice.drafter.source,
    }
    return chosen | settings


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Hosts may have folders of their own: of its configuration, and of the names, sizes and some bytes of its files of weights."""
    found = hashlib.sha256(msgspec.json.encode(checkpoint.config, order="deterministic"))
    files = [] if checkpoint.random else sorted(checkpoint.folder.glob("*.safetensors"))
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            stream.seek(size // 2)
            found.update(b"%s %d %s" % (file.name.encode(), size, stream.read(_SOME_BYTES)))
    return found.hexdigest()[:12]
