"""Which device each rank has, and what is said where there are too few. There is no GPU here: torch is asked by stand-ins."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from gpu.one_gpu_ranks import sharing

from enginery.config.resolve import DeviceFacts
from enginery.config.schema import EngineOptions
from enginery.contracts.parallel import ParallelFacts
from enginery.errors import ConfigError, Unsupported
from enginery.worker import device as device_module
from enginery.worker.device import devices_of_ranks, of_one_rank, own_gpus
from enginery.worker.ranks.gloo import LostRank, Standing
from enginery.worker.ranks.nccl import DeviceGroup

GPU = DeviceFacts(kind="cuda", name="a GPU", available_bytes=1000, num_threads=1)


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count: int = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    return count


def asked(**given: object) -> EngineOptions:
    return EngineOptions(**{"device": "cuda", "tp": 2, **given})


@pytest.mark.parametrize("gpus", [4], indirect=True)
@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("mesh", [{"tp": 4}, {"tp": 2, "pp": 2}, {"tp": 1, "dp_attention": 4}])
def test_each_rank_of_a_host_has_the_gpu_of_its_number(gpus: int, device: str, mesh: dict[str, int]) -> None:
    assert devices_of_ranks(asked(device=device, **mesh)) == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")


@pytest.mark.parametrize("gpus", [1], indirect=True)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, r"--tp 2 needs 2 GPUs, one for each rank, and 1 can be seen; .*CUDA_VISIBLE_DEVICES.*--device cpu"),
        ({"pp": 2}, r"--tp 2 --pp 2 needs 4 GPUs"),
        ({"device": "auto", "tp": 3}, r"--tp 3 needs 3 GPUs"),
        ({"device": "cuda:0"}, r"device is 'cuda:0', one GPU, but 2 ranks need one each; write --device cuda"),
    ],
)
def test_too_few_gpus_are_named_before_anything_starts(gpus: int, given: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        devices_of_ranks(asked(**given))


def test_ranks_of_the_tests_on_one_gpu_share_it() -> None:
    """What `gpu.one_gpu_ranks` replaces is there, which no test shows that runs without a GPU."""
    with sharing():
        assert device_module.devices_of_ranks(asked()) == ("cuda:0", "cuda:0")


@pytest.mark.parametrize("gpus", [1], indirect=True)
def test_ranks_that_join_have_the_gpu_that_they_see(gpus: int) -> None:
    assert devices_of_ranks(asked(), joining=True) == ("cuda", "cuda")
    assert devices_of_ranks(asked(device="auto"), joining=True) == ("cuda", "cuda")


@pytest.mark.parametrize("gpus", [0, 1], indirect=True)
def test_ranks_of_a_cpu_share_it(gpus: int) -> None:
    assert devices_of_ranks(asked(device="cpu")) == ("cpu", "cpu")


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.parametrize("joining", [False, True])
def test_where_there_is_no_gpu_ranks_are_on_the_cpu(gpus: int, joining: bool) -> None:
    """An executor is told so: for `auto` Ray was asked for GPUs, which nobody had."""
    assert devices_of_ranks(asked(device="auto"), joining=joining) == ("cpu", "cpu")


def test_a_rank_has_its_gpu_to_itself_and_a_part_of_the_hosts_memory() -> None:
    two = ParallelFacts(tensor_size=2)
    assert of_one_rank(GPU, two).available_bytes == 1000
    assert of_one_rank(replace(GPU, kind="cpu"), two).available_bytes == 500


def test_replicas_of_several_ranks_have_gpus_of_their_own() -> None:
    from enginery.config.schema import HostShare

    share = HostShare(index=1, count=2, num_ranks=2, host_bytes=0)
    assert own_gpus(share, 4, "4,5,6,7") == ["6", "7"]


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_is_named() -> None:
    store = torch.distributed.HashStore()
    with pytest.raises(Unsupported, match=r"torch .* is built without NCCL"):
        DeviceGroup(store, "all", rank=0, size=1, standing=Standing(), device=torch.device("cuda", 0))


@pytest.mark.parametrize("own", [{}, {"NCCL_NVLS_ENABLE": "1"}], ids=["usual", "asked for"])
def test_nccl_is_started_without_multicast_unless_that_is_asked_for(own: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_GRAPH_REGISTER": "0"}
    monkeypatch.setattr(os, "environ", own.copy())
    found = dict[str, str]()

    class Nccl:
        class Options:
            _timeout = None

        def __init__(self, *given: object) -> None:
            found.update(os.environ)
            raise RuntimeError("nobody came")

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    with pytest.raises(LostRank, match="the ranks of all did not meet on their GPUs: nobody came"):
        DeviceGroup(torch.distributed.HashStore(), "all", rank=0, size=1, standing=Standing(), device=torch.device("cuda", 0))
    assert {name: found[name] for name in usual} == usual | own
