"""What each of several engines behind one front is given, and what a start that fails leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys

import pytest
from running import SERVER

from enginery.child_process import begin
from enginery.config.schema import EngineOptions, HostShare
from enginery.errors import ConfigError
from enginery.llm.keyword_options import engine_options
from enginery.plugin.registry import Registry
from enginery.serve.engine.client import EngineClient
from enginery.serve.engine.replica_options import replica_options
from enginery.serve.engine.replicas import Replicas
from enginery.worker import device


def test_one_that_does_not_start_ends_the_start(folder):
    command = [sys.executable, SERVER, str(folder), "0", "broken", "1", json.dumps({"dp": 2, "restarts": 1})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    why = r"replica [01] did not start, and all 2 must \(--restarts .*\): the weights are gone; fetch them again"
    assert done.returncode == 2
    assert re.fullmatch(f"engine: {why}", done.stderr.splitlines()[-1])
    assert "are left" not in done.stderr


def test_each_has_a_number_files_and_a_share_of_its_own():
    asked = EngineOptions(profile_file="a/steps.json", record_steps=(3, "kept"), dp_rank=4)
    registry = Registry.load(no_plugins=True)
    assert replica_options(asked, 1, registry) == [(asked, None)]
    first, second = replica_options(asked, 2, registry)
    assert (first[0].dp_rank, second[0].dp_rank) == (4, 5)
    assert (second[0].profile_file, second[0].record_steps) == ("a/steps-1.json", (3, "kept-1"))
    assert (second[1].index, second[1].count, second[1].host_bytes) == (1, 2, first[1].host_bytes)


def test_a_share_of_a_cpu_is_part_of_its_threads_and_memory(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 9)
    monkeypatch.setattr(device, "available_host_bytes", lambda: 60)
    asked, share = EngineOptions(device="cpu", memory_fraction=0.8), HostShare(index=1, count=2, num_ranks=1, host_bytes=100)
    found = device.within_share(asked, share)
    assert found.num_threads == 4
    assert found.memory_fraction * 60 == pytest.approx(0.8 * 50), "as at first, where others have taken their part meanwhile"
    assert device.within_share(dataclasses.replace(asked, num_threads=3), share).num_threads == 3
    monkeypatch.setattr(device, "available_host_bytes", lambda: 40)
    assert device.within_share(asked, share).memory_fraction == 0.8


def test_gpus_are_given_out_by_number_and_too_few_are_refused(monkeypatch):
    registry = Registry.load(no_plugins=True)

    def own(index: int, num_gpus: int = 4, visible: str | None = None, **options: object) -> list[str]:
        share = replica_options(EngineOptions(**options), 2, registry)[index][1]
        return device.own_gpus(share, num_gpus, visible)

    assert [own(index) for index in range(2)] == [["0"], ["1"]]
    assert [own(index, tp=2, device="cuda") for index in range(2)] == [["0", "1"], ["2", "3"]]
    assert own(1, visible="GPU-a,GPU-b,5,6", tp=2) == ["5", "6"]
    with pytest.raises(
        ConfigError, match=r"--dp 2 needs 4 GPUs, 2 for each replica, but there are 3; lower --dp, or use --device cpu"
    ):
        own(0, 3, tp=2)
    joined = {"tp": 2, "executor": "join", "listen": "tcp://127.0.0.1:5550"}  # the second rank of each brings its own
    assert [own(index, 2, **joined) for index in range(2)] == [["0"], ["1"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert device.within_share(EngineOptions(), HostShare(index=1, count=2, num_ranks=1, host_bytes=1)).device == "cuda"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


def test_llm_says_what_there_is_instead():
    with pytest.raises(ConfigError, match="run engine serve --dp N"):
        engine_options("x", {"dp": 2}, owner="LLM")


def test_where_one_engine_cannot_be_started_nothing_of_the_others_is_left(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    manifest, made = Registry.load(no_plugins=True).manifest, []

    async def start(command: list[str], **given: object) -> EngineClient:
        begun = functools.partial(begin, command)
        made.append(await EngineClient.start(EngineOptions(model=str(folder)), manifest, begin=begun, **given))
        return made[-1]

    starts = [functools.partial(start, command) for command in (["sleep", "60"], ["/no/such/engine"])]
    with pytest.raises(ConfigError, match=r"cannot be started: .*No such file or directory.*ulimit -a shows limits"):
        asyncio.run(Replicas.start(*starts))
    assert [client.child.is_running for client in made] == [False]
    assert list((tmp_path / "t").iterdir()) == []
