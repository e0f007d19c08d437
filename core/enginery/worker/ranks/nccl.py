"""How ranks exchange tensors in the memory of GPUs: NCCL's kernels, on the stream that is current, so that graphs capture them.

The host waits for nothing here: that an exchange has ended is known when what follows it on the device has. So a rank that hangs
shows where the host waits for a step, and what ends the waiting is to end the kernels (`Standing.on_sever`). N rows, C columns, R
ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store, Work

from enginery.errors import Unsupported
from enginery.worker.ranks.gloo import FIRST, FOR_EVER, TAG, Group, LostRank, Sending, Standing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DEFAULTS: Final = {
    "NCCL_NVLS_ENABLE": "0",  # multicast: not every machine gives it, and where one does, it can take GPUs from its other users
    "NCCL_GRAPH_REGISTER": "0",  # each rank would map what others capture, and GPUs may wait for kernels before they map anything
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # it ends this process; who ends what is decided by those that watch the processes
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # likewise
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # every second it asks the store who waits for a dump, and for a minute when that is gone
}


class DeviceGroup:
    """Some ranks, each with a GPU, as `Group` is. What it makes is on the device."""

    def __init__(self, store: Store, name: str, *, rank: int, size: int, standing: Standing, device: torch.device) -> None:
        """Wait until all have come, so that nothing is left to be connected when graphs are captured. Raises `LostRank`."""
        if not dist.is_nccl_available():
            raise Unsupported(
                f"torch {torch.__version__} is built without NCCL, by which ranks on GPUs exchange tensors; install one with it"
            )
        for variable, value in _DEFAULTS.items():
            os.environ.setdefault(variable, value)
        self.rank, self.size, self.device = rank, size, device
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOR_EVER
        standing.waits = f"meeting of {name}"
        try:
            made = dist.ProcessGroupNCCL(PrefixStore(name, store), rank, size, options)
            self._group = cast("ProcessGroup", made)  # it has its methods
            standing.on_sever(made.abort)
            self.sum(torch.zeros(1, device=device))
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise LostRank(f"the ranks of {name} did not meet on their GPUs: {error}") from error
        standing.waits = ""

    def close(self) -> None:
        """When nothing more is exchanged: the end of its threads and of what it holds of the device."""
        self._group.abort()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x, options = x.contiguous(), dist.AllreduceOptions()
        options.asyncOp = False
        _order(self._group.allreduce([x], options))
        return x

    def own_part_sum(self, x: torch.Tensor) -> torch.Tensor:
        x, options = x.contiguous(), dist.ReduceScatterOptions()
        options.asyncOp = False
        found = x.new_empty(len(x) // self.size, *x.shape[1:])
        _order(self._group._reduce_scatter_base(found, x, options))
        return found

    def of_all(self, x: torch.Tensor) -> list[torch.Tensor]:
        x, options = x.contiguous(), AllgatherOptions()
        options.asyncOp = False
        found = x.new_empty(self.size, *x.shape)
        _order(self._group._allgather_base(found, x, options))
        return list(found)

    def at_first(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = self.of_all(x)  # one way less of NCCL's that graphs have to hold
        return found if self.rank == FIRST else []

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = FIRST, 0, False
        _order(self._group.broadcast([x], options))
        return x

    def send(self, x: torch.Tensor, rank: int) -> Sending:
        """To that rank, beside what follows on this stream. `x` is not to be changed any more."""
        x = x.contiguous()
        return x, self._group.send([x], rank, TAG)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> torch.Tensor:
        """The next that this rank sent: what follows on this stream waits for it."""
        x = torch.empty(*shape, dtype=dtype, device=self.device)
        _order(self._group.recv([x], rank, TAG))
        return x


def _order(work: Work | None) -> None:
    """Have the current stream go on behind the exchange; None: it is on that stream already."""
    if work is not None:
        work.wait()


TensorGroup = Group | DeviceGroup
