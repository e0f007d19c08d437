"""What one of several engines on a host takes of it: GPUs of its own, or a part of the processors and of the memory."""

from __future__ import annotations

import dataclasses
import os

import torch

from enginery.config.schema import EngineOptions, HostShare
from enginery.errors import ConfigError
from enginery.worker.host_memory import available_host_bytes


def within(asked: EngineOptions, share: HostShare) -> EngineOptions:
    """The options of this engine. Before CUDA is used: it leaves this process the GPUs that are its own.

    Threads that were asked for are of each engine. Raises `ConfigError` where there are too few GPUs.
    """
    num_gpus = torch.cuda.device_count() if asked.device == "auto" or asked.device.startswith("cuda") else 0
    if num_gpus or asked.device.startswith("cuda"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own_gpus(asked, share, num_gpus, os.environ.get("CUDA_VISIBLE_DEVICES")))
        return dataclasses.replace(asked, device="cuda")
    threads = asked.num_threads or max(1, torch.get_num_threads() // share.count)
    part = min(1.0, share.host_bytes / share.count / available_host_bytes())
    return dataclasses.replace(asked, num_threads=threads, memory_fraction=asked.memory_fraction * part)


def own_gpus(asked: EngineOptions, share: HostShare, num_gpus: int, visible: str | None) -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them. visible: what that is now."""
    each = asked.tp * asked.pp
    if asked.device not in ("auto", "cuda"):
        raise ConfigError(f"device is {asked.device!r}, but --dp {share.count} needs GPUs for each replica; write --device cuda")
    if num_gpus < each * share.count:
        raise ConfigError(
            f"--dp {share.count} needs {each * share.count} GPUs, {each} for each replica, but there are {num_gpus}; lower --dp, "
            "or use --device cpu"
        )
    names = visible.split(",") if visible else [str(index) for index in range(num_gpus)]
    return names[each * share.index : each * (share.index + 1)]
