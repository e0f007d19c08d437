"""What the machine has, and what one of several engines may take of it."""

from __future__ import annotations

import dataclasses
import os

import torch

from enginery.config.host_memory import available_host_bytes
from enginery.config.resolve import DeviceFacts
from enginery.config.schema import EngineOptions, HostShare
from enginery.contracts.parallel import ParallelFacts
from enginery.errors import ConfigError


def device_facts(asked: str, num_threads: int | None) -> DeviceFacts:
    """Facts of the device asked for: "auto" (CUDA if there is any), "cpu", "cuda" or "cuda:1"."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked.split(":")[0]
    threads = num_threads or torch.get_num_threads()
    if kind == "cpu":
        return DeviceFacts(
            kind="cpu",
            name=f"{threads} thread{'s' * (threads > 1)}",
            available_bytes=available_host_bytes(),
            num_threads=threads,
            has_bfloat16=torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        )
    if kind != "cuda":
        raise ConfigError(f"device is {asked!r}, but must be auto, cpu, cuda or cuda:<index>")
    if not torch.cuda.is_available():
        raise ConfigError(f"device is {asked!r}, but torch {torch.__version__} sees no CUDA device; use --device cpu")
    index = torch_device(asked).index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device is {asked!r}, but there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    free, _ = torch.cuda.mem_get_info(index)
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    return DeviceFacts(kind="cuda", name=name, available_bytes=free, num_threads=threads, compute_capability=capability)


def of_one_rank(device: DeviceFacts, parallel: ParallelFacts, *, is_shared: bool = True) -> DeviceFacts:
    """The part of a host that one of its ranks may take, which has a GPU to itself. is_shared: all are on one."""
    if device.kind != "cpu":
        return device
    return dataclasses.replace(device, available_bytes=device.available_bytes // (parallel.num_ranks if is_shared else 1))


def devices_of_ranks(asked: EngineOptions, *, joining: bool = False) -> tuple[str, ...]:
    """The option `device` of each rank: on one host, each has its own GPU. Raises `ConfigError` where there are too few.

    joining: ranks come from anywhere, and each takes the first GPU that it sees.
    """
    count = asked.num_ranks
    device = torch_device("auto").type if asked.device == "auto" else asked.device
    if joining or not (device.startswith("cuda") and torch.cuda.is_available()):
        return (device,) * count
    if device != "cuda":
        raise ConfigError(
            f"device is {asked.device!r}, one GPU, but {count} ranks need one each; write --device cuda, and say which they are by "
            "CUDA_VISIBLE_DEVICES"
        )
    if (present := torch.cuda.device_count()) < count:
        flags = {"--tp": asked.tp, "--pp": asked.pp, "--dp-attention": asked.dp_attention}
        raise ConfigError(
            f"{' '.join(f'{flag} {number}' for flag, number in flags.items() if number > 1)} needs {count} GPUs, one for each "
            f"rank, and {present} can be seen; use fewer ranks, look at CUDA_VISIBLE_DEVICES, have ranks of other hosts join "
            "(--executor join), or run on the CPU (--device cpu)"
        )
    return tuple(f"cuda:{rank}" for rank in range(count))


def torch_device(asked: str) -> torch.device:
    """The device asked for, with an index if it is a GPU. Raises `ConfigError` for what torch does not know."""
    try:
        device = torch.device(asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError as error:
        raise ConfigError(f"device is {asked!r}, but must be auto, cpu, cuda or cuda:<index>") from error
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def within_share(asked: EngineOptions, share: HostShare) -> EngineOptions:
    """The options of this engine. Before CUDA is used: it leaves this process the GPUs that are its own.

    Threads that were asked for are of each engine. Raises `ConfigError` where there are too few GPUs.
    """
    num_gpus = torch.cuda.device_count() if asked.device == "auto" or asked.device.startswith("cuda") else 0
    if num_gpus or asked.device.startswith("cuda"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own_gpus(share, num_gpus, os.environ.get("CUDA_VISIBLE_DEVICES")))
        return dataclasses.replace(asked, device="cuda")
    threads = asked.num_threads or max(1, torch.get_num_threads() // share.count)
    part = min(1.0, share.host_bytes / share.count / available_host_bytes())
    return dataclasses.replace(asked, num_threads=threads, memory_fraction=asked.memory_fraction * part)


def own_gpus(share: HostShare, num_gpus: int, visible: str | None) -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them. visible: what that is now."""
    each = share.num_ranks
    if num_gpus < each * share.count:
        raise ConfigError(
            f"--dp {share.count} needs {each * share.count} GPUs, {each} for each replica, but there are {num_gpus}; lower --dp, "
            "or use --device cpu"
        )
    names = visible.split(",") if visible else [str(index) for index in range(num_gpus)]
    return names[each * share.index : each * (share.index + 1)]
