"""Ranks that join an engine over tcp, as those of other hosts do: who may, who is missed, and what happens when one is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import zmq
from engine import joined_members
from engine.draft_models import SAID, embedded, prompt_of
from engine.joined_members import OPTIONS, PROGRAM, PROMPTS, Member, free_address, in_background, listening, options
from engine.rank_pair import request, serve
from free_ports import free_ports

from enginery.config.schema import EngineOptions
from enginery.contracts.parallel import Death
from enginery.engine.engine import Engine
from enginery.engine.ranks import joined, messages
from enginery.engine.ranks.keys import RankKey
from enginery.engine.ranks.wires import TcpWires
from enginery.errors import ConfigError, EngineDied
from enginery.plugin.registry import Registry
from enginery_weights_tiny import DRAFTERS, FOLDER

key_file, members = joined_members.key_file, joined_members.members  # fixtures


def listeners() -> set[str]:
    """Where this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {f"tcp://{at.laddr.ip}:{at.laddr.port}" for at in found if at.status == psutil.CONN_LISTEN}


class HalfKey(RankKey):
    """Of one who knows with whom to speak, which is no secret, and has no key that is known there."""

    def secure_rank(self, socket: zmq.Socket[bytes]) -> None:
        super().secure_rank(socket)
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


class Visitor:
    """Speaks to an engine's port as an `engine rank` does, from this process."""

    def __init__(self, address: str, key: RankKey | None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.link = self.context.socket(zmq.DEALER)
        if key is not None:
            key.secure_rank(self.link)
        self.link.connect(address)

    def say(self, **said: object) -> None:
        join = messages.Join(**{"rank": None, "version": joined.__version__, "host": "visitor", "pid": 7, **said})
        with contextlib.suppress(zmq.Again):  # refused, and not trying any more
            self.link.send(messages.encode(join), zmq.NOBLOCK)

    def hear(self) -> messages.ToJoined:
        assert self.link.poll(20_000)
        return messages.decode_to_joined(self.link.recv())

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.mark.parametrize("mesh", ["tp", "pp"])
def test_a_rank_that_joined_tells_what_one_process_tells(
    mesh: str, key_file: Path, members: list[Member], registry: Registry
) -> None:
    """Strangers without the key come to every port meanwhile, before it and after it."""
    asked = options(key_file, **{"tp": 1, mesh: 2})
    requests = [request(str(index), prompt, logprobs=1) for index, prompt in enumerate(PROMPTS)]
    keys = (None, RankKey.new(), HalfKey(RankKey.read(str(key_file)).text))
    strangers = [Visitor(str(asked.listen), key) for key in keys]
    others = listeners()
    members.append(Member(str(asked.listen), key_file, "--num-threads=1"))
    engine = Engine.build(asked, registry)
    try:
        strangers += [Visitor(address, key) for address in listeners() - others for key in keys]
        for stranger in strangers:
            stranger.say()
        found = serve(engine, requests)
    finally:
        engine.close()
    for stranger in strangers:
        assert not stranger.link.poll(0)
        stranger.close()
    code, said = members[0].end()
    assert code == 0, said
    one = serve(Engine.build(EngineOptions(**OPTIONS), registry), requests)
    assert {name: told.tokens for name, told in found.items()} == {name: told.tokens for name, told in one.items()}


@pytest.mark.parametrize(
    ("drafter", "given"), [("auto", None), ("auto", "eagle"), ("standalone", "standalone")], ids=["shipped", "eagle", "standalone"]
)
def test_a_rank_that_joined_speculates_with_a_draft_model_elsewhere(
    drafter: str, given: str | None, key_file: Path, tmp_path: Path, members: list[Member], registry: Registry
) -> None:
    """Both models are in other folders on its host: nothing ships with a copy. Drafts are right as often as on one rank."""
    folder = DRAFTERS[given or "eagle"]
    model, draft = (Path(shutil.copytree(found, tmp_path / found.name)) for found in (FOLDER, folder))
    alone = embedded(drafter=drafter, draft_model=given and str(folder), draft_length="3", max_batch_tokens=96, step_deadline=20.0)
    asked = dataclasses.replace(alone, tp=2, executor="join", listen=free_address(), rank_key_file=str(key_file))
    requests = [request(f"{at}", prompt_of(SAID[at]), max_tokens=16, temperature=0.7 * (at % 2), seed=at) for at in range(3)]
    one = Engine.build(alone, registry)
    expected = serve(one, requests)
    elsewhere = (f"--model={model}", f"--draft-model={draft}", "--num-threads=1")
    members.append(Member(str(asked.listen), key_file, *elsewhere))
    engine = Engine.build(asked, registry)
    try:
        assert {name: told.tokens for name, told in serve(engine, requests).items()} == {
            name: told.tokens for name, told in expected.items()
        }
        drafts = engine.meter.stats().drafts
    finally:
        engine.close()
    assert drafts == one.meter.stats().drafts
    assert drafts.accepted > 10
    assert members[0].end()[0] == 0


@pytest.mark.parametrize(("count", "ranks"), [(1, "rank 1"), (3, "ranks 1 to 3")])
def test_the_log_says_which_ranks_may_join_and_where(
    count: int, ranks: str, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(key_file, count) as port, caplog.at_level("INFO"):
        port.given_up.set()
        with pytest.raises(EngineDied, match="given up"):
            port.wait()
    assert caplog.messages == [f"{ranks} may join at {port.address}"]


def test_a_second_rank_of_an_engine_that_wants_one_is_told_so(key_file: Path) -> None:
    with listening(key_file, count=1) as port:
        result = in_background(port.wait)
        second, first = (Visitor(port.address, RankKey.read(str(key_file))) for _ in range(2))
        second.say(rank=2)
        assert second.hear() == messages.Refused("the engine has rank 1 to give away, not 2")
        first.say()
        result()
        for visitor in (second, first):
            visitor.close()


def test_nothing_listens_at_other_interfaces(key_file: Path) -> None:
    """The store of torch.distributed has no keys: it is where the engine listens, and nowhere else."""
    before = listeners()
    wires = TcpWires("tcp://127.0.0.1:0", RankKey.read(str(key_file)), deadline_s=20.0)
    link, address = wires.bind(zmq.PULL, "reports")
    store, meeting = wires.store(2)
    try:
        assert listeners() - before == {wires.address, address, meeting}
        assert store.num_keys() >= 0
    finally:
        link.close(0)
        wires.close()


def test_a_wrong_key_is_refused_and_said_on_both_sides(
    key_file: Path, tmp_path: Path, members: list[Member], caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other.key"
    RankKey.new().write(other)
    with listening(key_file) as port:
        result = in_background(port.wait)
        members.append(Member(port.address, other))
        code, said = members[-1].end()
        assert code == 2
        assert f"the engine at {port.address} refused the key of this rank; --rank-key-file must have the same" in said
        members.append(Member(port.address, key_file))
        ranks = result()
        assert ranks.name(1).endswith(f"process {members[-1].process.pid})")
        ranks.end(grace_s=0.0)
    code, said = members[-1].end()
    assert (code, said) == (1, f"engine: the engine at {port.address} is gone, and this rank ends with it\n")
    assert f"somebody without the key of this engine's ranks was refused at {port.address}" in caplog.text


def test_who_does_not_come_is_missed_by_number(key_file: Path, registry: Registry) -> None:
    asked = options(key_file, pp=2, step_deadline=0.1)
    visitor = Visitor(str(asked.listen), RankKey.read(str(key_file)))
    visitor.say(rank=2)
    with pytest.raises(EngineDied) as died:
        Engine.build(asked, registry)
    visitor.close()
    assert re.search(
        r"rank 1, 3 of 4 did not join at tcp://127.0.0.1:\d+ in 1 s, ten times --step-deadline; rank 2 is visitor process 7\. "
        r"Start it by engine rank --join",
        str(died.value),
    )


def test_a_rank_that_finds_no_engine_says_so(key_file: Path, members: list[Member]) -> None:
    members.append(Member(address := free_address(), key_file, "--wait-s=0.2"))
    assert members[0].end() == (1, f"engine: no engine has listened at {address} for 0.2 s; this rank ends\n")


def test_who_cannot_be_a_rank_is_told_why_and_others_still_join(key_file: Path) -> None:
    key = RankKey.read(str(key_file))
    with listening(key_file, count=2) as port:
        result = in_background(port.wait)
        visitors = {name: Visitor(port.address, key) for name in ("old", "beyond", "second", "again", "any", "late")}
        visitors["old"].say(version="0.0.1")
        assert re.match(r"the engine has enginery .*, this rank 0\.0\.1; install the same", visitors["old"].hear().why)
        visitors["beyond"].say(rank=3)
        assert visitors["beyond"].hear() == messages.Refused("the engine has ranks 1 to 2 to give away, not 3")
        visitors["second"].say(rank=2)
        assert visitors["second"].hear() == messages.StillHere(20.0)
        visitors["again"].say(rank=2)
        assert visitors["again"].hear() == messages.Refused("rank 2 has joined already, from visitor process 7")
        visitors["any"].say()
        ranks = result()
        visitors["late"].say()
        ranks.boot(1, b"one")
        ranks.boot(2, b"two")
        while not visitors["late"].link.poll(10):
            assert ranks.poll() == []
        assert visitors["late"].hear() == messages.Refused("all ranks of this engine have joined already")
        told = {name: visitors[name].hear() for name in ("any", "second")}
        while any(isinstance(said, messages.StillHere) for said in told.values()):
            told = {name: visitors[name].hear() if isinstance(said, messages.StillHere) else said for name, said in told.items()}
        assert told == {"any": messages.BootFrame(rank=1, frame=b"one"), "second": messages.BootFrame(rank=2, frame=b"two")}
        visitors["second"].close()
        end_s = time.monotonic() + 10
        while not (deaths := ranks.poll()):
            assert time.monotonic() < end_s
            time.sleep(0.02)
        assert deaths == [Death(2, 1, "was lost: its connection is closed", ())]
        ranks.end(grace_s=0.0)
    for visitor in visitors.values():
        visitor.close()


def num_connections(address: str) -> int:
    """Those of this process that listens there, which it has not closed."""
    port = int(address.rpartition(":")[2])
    return sum(each.laddr.port == port and bool(each.raddr) for each in psutil.Process().net_connections("tcp"))


def test_who_leaves_before_all_have_come_may_come_again(key_file: Path) -> None:
    """Its launcher starts it anew."""
    key = RankKey.read(str(key_file))
    with listening(key_file, count=2) as port:
        result = in_background(port.wait)
        first, again, other = (Visitor(port.address, key) for _ in range(3))
        first.say(rank=1)
        first.hear()
        first.close()
        end_s = time.monotonic() + 20
        while num_connections(port.address) > 2:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        time.sleep(0.1)  # the engine's port hears of it when it looks next
        again.say(rank=1, pid=8)
        assert again.hear() == messages.StillHere(20.0)
        other.say()
        ranks = result()
        assert (ranks.name(1), ranks.name(2)) == ("rank 1 (visitor process 8)", "rank 2 (visitor process 7)")
        ranks.end(grace_s=0.0)
    again.close()
    other.close()


@pytest.mark.parametrize("whom", ["rank", "command"])
def test_a_killed_rank_ends_the_engine_with_that_cause(
    whom: str, key_file: Path, members: list[Member], registry: Registry
) -> None:
    asked = options(key_file)
    members.append(Member(str(asked.listen), key_file, "--num-threads=1"))
    engine = Engine.build(asked, registry)
    rank = members[0].rank()
    killed = rank if whom == "rank" else psutil.Process(members[0].process.pid)
    threading.Timer(0.3, killed.kill).start()
    began_s = time.monotonic()
    with pytest.raises(EngineDied) as died:
        serve(engine, [request(str(index), [7, 8, 9], max_tokens=400) for index in range(1000)])
    assert time.monotonic() - began_s < 15
    how = r"was killed by SIGKILL, as the kernel does" if whom == "rank" else "was lost: its connection is closed"
    assert re.match(rf"rank 1 \(.* process {members[0].process.pid}\) {how}", str(died.value))
    engine.close()
    if whom == "rank":
        code, said = members[0].end()
        assert code == 128 + signal.SIGKILL
        assert "rank 1 was killed by SIGKILL, as the kernel does when memory runs out; dmesg tells" in said.splitlines()[-1]
    _, alive = psutil.wait_procs([rank, psutil.Process(members[0].process.pid)] if whom == "command" else [rank], timeout=5)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_ranks_end_when_the_engine_s_process_is_killed(key_file: Path, members: list[Member]) -> None:
    asked = {name: value for name, value in dataclasses.asdict(options(key_file)).items() if value is not None}
    given = {name: asked[name] for name in (*OPTIONS, "tp", "executor", "listen", "rank_key_file")}
    members.append(Member(str(asked["listen"]), key_file, "--num-threads=1"))
    with subprocess.Popen(
        [sys.executable, PROGRAM, json.dumps(given), "[]", "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        rank = members[0].rank()
        engine.send_signal(signal.SIGKILL)
    code, said = members[0].end(timeout=5)
    assert code == 1
    assert "is gone, and this rank ends with it" in said
    assert not psutil.wait_procs([rank], timeout=5)[1]


def test_a_key_is_its_owner_s_and_never_written_over(tmp_path: Path) -> None:
    file = tmp_path / "ranks.key"
    make = [sys.executable, "-m", "enginery", "rank", "--new-key", str(file)]
    subprocess.run(make, check=True)
    assert file.stat().st_mode & 0o777 == 0o600
    key = RankKey.read(str(file)).text
    again = subprocess.run(make, capture_output=True, text=True, check=False)
    assert (again.returncode, RankKey.read(str(file)).text) == (2, key)
    assert "is there already, and a key stays as it is; name another file" in again.stderr
    file.write_text(key[:-1])
    with pytest.raises(ConfigError, match=r"ranks.key is no key of ranks; engine rank --new-key FILE makes one"):
        RankKey.read(str(file))


def test_replicas_listen_at_ports_of_their_own(key_file: Path) -> None:
    port = free_ports(2)
    wires = TcpWires(f"tcp://127.0.0.1:{port}", RankKey.read(str(key_file)), deadline_s=20.0, replica=1)
    wires.close()
    assert wires.address == f"tcp://127.0.0.1:{port + 1}"
