"""What the doctor says of several ranks: on this machine, and where something of it is missing."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import quick_processes
import torch

from enginery.cli import doctor as doctor_module
from enginery.cli import doctor_ranks
from enginery.cli.doctor_checks import Check

FOUND = {"gloo": True, "nccl": "2.27.3", "apart": []}


def checks(num_gpus: int = 2, **changes: object) -> dict[str, Check]:
    return {check.name: check for check in doctor_ranks.ranks(num_gpus, **FOUND | changes)}


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """So much shared memory is free."""
    usage = SimpleNamespace(free=1 << 34)
    monkeypatch.setattr(doctor_ranks, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    return usage


def test_what_this_torch_has_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked in a process of its own, as the command asks it."""
    with quick_processes.code_too("torch"):
        found, why = doctor_module._ask(doctor_module._ASK_TORCH)
    assert found is not None, why
    assert found["gloo"] == torch.distributed.is_gloo_available()
    assert bool(found["nccl"]) == torch.distributed.is_nccl_available()
    assert found["apart"] == [] or len(found["devices"]) > 1
    monkeypatch.setattr(doctor_module, "_ask", lambda code: (found, why) if code == doctor_module._ASK_TORCH else (None, ""))
    assert {check.name for check in doctor_module._torch()} >= {"ranks", "shared memory"}


def test_several_gpus_that_have_all_are_well(free: SimpleNamespace) -> None:
    found = checks()
    assert {name: check.status for name, check in found.items()} == {"ranks": "ok", "shared memory": "ok", "peers": "ok"}
    assert found["ranks"].detail == "gloo, for ranks on CPUs; NCCL 2.27.3, for ranks on GPUs"
    assert found["peers"].detail == "each of 2 GPUs reads the memory of the others"


def test_one_device_is_asked_for_nothing_that_only_several_need(free: SimpleNamespace) -> None:
    free.free = 1 << 20
    found = checks(0, nccl="")
    assert {name: check.status for name, check in found.items()} == {"ranks": "ok", "shared memory": "ok"}
    assert found["shared memory"].detail.endswith(", 1 MiB free")


def test_a_container_s_64_mib_of_shared_memory_are_too_few(free: SimpleNamespace) -> None:
    free.free = 64 << 20
    check = checks()["shared memory"]
    assert check.status == "warn"
    assert "64 MiB free; NCCL needs some for each pair of GPUs" in check.detail
    assert "--shm-size" in check.advice


def test_absent_shared_memory_is_told(free: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_ranks, "SHARED_MEMORY", tmp_path / "none")
    assert checks()["shared memory"].status == "warn"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gloo": False}, "torch is built without gloo: --tp and --pp cannot run, one rank is not affected"),
        ({"nccl": ""}, "gloo, but no NCCL: GPUs cannot exchange tensors"),
    ],
    ids=str,
)
def test_a_torch_without_a_library_is_told_what_cannot_run(free: SimpleNamespace, changes: dict[str, object], told: str) -> None:
    check = checks(**changes)["ranks"]
    assert (check.status, check.detail[: len(told)]) == ("warn", told)
    assert check.advice


def test_gpus_that_do_not_reach_each_other_are_named(free: SimpleNamespace) -> None:
    check = checks(3, apart=[[0, 2], [1, 2]])["peers"]
    assert check.status == "warn"
    assert check.detail.startswith("GPUs 0 and 2, 1 and 2 cannot read each other's memory: sums of their ranks go over the host")
