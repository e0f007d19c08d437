"""Ranks of two network namespaces, which are as two hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import joined_members
from engine.joined_members import OPTIONS, PROGRAM, PROMPTS, Member
from engine.rank_pair import request, serve

from enginery.config.schema import EngineOptions
from enginery.engine.engine import Engine
from enginery.engine.ranks.keys import RankKey
from enginery.plugin.registry import Registry

key_file, members = joined_members.key_file, joined_members.members  # fixtures


class Hosts:
    """Two network namespaces with a cable between them: as two hosts, but of one file system."""

    def __init__(self) -> None:
        self.names = [f"enginery-{os.getpid()}-{end}" for end in "ab"]

    def make(self) -> None:
        (here, there), cables = self.names, [f"eng{os.getpid()}{end}" for end in "ab"]
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", cables[0], "netns", here, "type", "veth", "peer", "name", cables[1], "netns", there)
        for number, (name, cable) in enumerate(zip(self.names, cables, strict=True), start=1):
            _ip("-n", name, "addr", "add", f"10.213.77.{number}/24", "dev", cable)
            _ip("-n", name, "link", "set", cable, "up")

    def inside(self, index: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.names[index])

    def cut(self) -> None:
        _ip("-n", self.names[0], "link", "set", f"eng{os.getpid()}a", "down")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    try:
        made.make()
    except (OSError, subprocess.CalledProcessError) as error:
        made.remove()
        pytest.skip(f"no network namespaces can be made here: {error}")
    yield made
    made.remove()


ADDRESS = "tcp://10.213.77.1:5550"


def test_ranks_of_two_network_namespaces(
    hosts: Hosts, key_file: Path, tmp_path: Path, members: list[Member], registry: Registry
) -> None:
    """Neither reaches the other's loopback; a wrong key is refused first."""
    given = {**OPTIONS, "tp": 2, "executor": "join", "listen": ADDRESS, "rank_key_file": str(key_file)}
    other = tmp_path / "other.key"
    RankKey.new().write(other)
    command = [*hosts.inside(0), sys.executable, PROGRAM, json.dumps(given), json.dumps(PROMPTS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        try:
            members.append(Member(ADDRESS, other, before=hosts.inside(1)))
            code, said = members[0].end(timeout=60)
            assert (code, "refused the key of this rank" in said) == (2, True), said
            members.append(Member(ADDRESS, key_file, "--num-threads=1", before=hosts.inside(1)))
            out, _ = engine.communicate(timeout=90)
        finally:
            engine.kill()
    assert members[1].end()[0] == 0
    one = serve(
        Engine.build(EngineOptions(**OPTIONS), registry), [request(str(index), prompt) for index, prompt in enumerate(PROMPTS)]
    )
    assert json.loads(out) == [told.tokens for told in one.values()]


def test_hosts_that_do_not_reach_each_other_any_more_both_end(hosts: Hosts, key_file: Path, members: list[Member]) -> None:
    """The cable is cut: no connection is closed, and nobody hears of it."""
    given = {**OPTIONS, "tp": 2, "executor": "join", "listen": ADDRESS, "rank_key_file": str(key_file), "step_deadline": 3.0}
    command = [*hosts.inside(0), sys.executable, PROGRAM, json.dumps(given), json.dumps(PROMPTS), "wait"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as engine:
        try:
            members.append(Member(ADDRESS, key_file, "--num-threads=1", before=hosts.inside(1)))
            assert engine.stdout is not None
            assert engine.stdout.readline() == "ready\n"
            hosts.cut()
            began_s = time.monotonic()
            code, said = members[0].end(timeout=20)
            _, err = engine.communicate(timeout=60)
        finally:
            engine.kill()
    assert code == 1
    assert f"engine: the engine has said nothing at {ADDRESS} for 3 s; this rank ends\n" in said
    assert re.search(r"EngineDied: rank 1 \(.*\) (has said nothing for 3 s|was lost: its connection is closed)", err)
    assert time.monotonic() - began_s < 15
