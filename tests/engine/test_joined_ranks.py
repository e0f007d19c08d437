"""Ranks that join an engine over tcp, as those of other hosts do: who may, who is missed, and what happens when one is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import noise
import psutil
import pytest
import zmq
from engine.rank_pair import request, serve
from engine.test_draft_models import SAID, embedded, prompt_of

from enginery.config.schema import EngineOptions
from enginery.contracts.parallel import Death, ParallelFacts
from enginery.engine.engine import Engine
from enginery.engine.ranks import joined, messages
from enginery.engine.ranks.joined import JoinedRanks, Listening
from enginery.engine.ranks.keys import RankKey
from enginery.engine.ranks.wires import TcpWires
from enginery.errors import ConfigError, EngineDied, EnginError
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose
from enginery.worker.ranks.gloo import Standing, listening_store, open_store
from enginery.worker.ranks.groups import RankGroups
from enginery_weights_tiny import DRAFTERS, FOLDER

PROMPTS = [[5, 77, 200, 31] * 9, [8, 9, 140], [3] * 20]
OPTIONS = {**noise.OPTIONS, "device": "cpu", "dtype": "float32", "num_pages": 64, "num_threads": 1, "step_deadline": 20.0}
MEMBER = "enginery.engine.ranks.process"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "ranks.key"
    RankKey.new().write(file)
    return file


class Member:
    """An `engine rank` in a process of its own."""

    def __init__(self, address: str, key_file: Path, *flags: str, before: tuple[str, ...] = ()) -> None:
        command = [*before, sys.executable, "-m", "enginery", "rank", "--join", address, "--rank-key-file", str(key_file), *flags]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def end(self, timeout: float = 30) -> tuple[int, str]:
        """Its exit status, and what it wrote."""
        _, said = self.process.communicate(timeout=timeout)
        return self.process.returncode, said

    def rank(self) -> psutil.Process:
        """The process that it runs, once the engine has told it what to run."""
        end_s = time.monotonic() + 30
        while True:
            for child in psutil.Process(self.process.pid).children():
                if MEMBER in child.cmdline():
                    return child
            assert time.monotonic() < end_s
            time.sleep(0.02)


@pytest.fixture
def members() -> Iterator[list[Member]]:
    """What is in it at the end is ended."""
    made: list[Member] = []
    yield made
    for member in made:
        with member.process:
            member.process.kill()


def free_address() -> str:
    with zmq.Context() as context, context.socket(zmq.PULL) as link:
        port = link.bind_to_random_port("tcp://127.0.0.1")
    return f"tcp://127.0.0.1:{port}"


def listeners() -> set[str]:
    """Where this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {f"tcp://{at.laddr.ip}:{at.laddr.port}" for at in found if at.status == psutil.CONN_LISTEN}


def options(key_file: Path, **changes: object) -> EngineOptions:
    given = {**OPTIONS, "tp": 2, "executor": "join", "listen": free_address(), "rank_key_file": str(key_file)}
    return EngineOptions(**{**given, **changes})


@contextlib.contextmanager
def listening(key_file: Path, count: int = 1, deadline_s: float = 20.0) -> Iterator[Listening]:
    """Where ranks may join, without an engine behind it."""
    wires = TcpWires("tcp://127.0.0.1:0", RankKey.read(str(key_file)), deadline_s=deadline_s)
    try:
        found = wires.joining(count)
        assert found is not None
        yield found
    finally:
        wires.close()


def in_background(wait: Callable[[], JoinedRanks]) -> Callable[[], JoinedRanks]:
    """Begin to wait; what is returned has the result."""
    found: list[JoinedRanks | EnginError] = []

    def run() -> None:
        try:
            found.append(wait())
        except EnginError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> JoinedRanks:
        thread.join(30)
        if isinstance(found[0], EnginError):
            raise found[0]
        return found[0]

    return result


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


def test_who_leaves_before_all_have_come_may_come_again(key_file: Path) -> None:
    """Its launcher starts it anew."""
    key = RankKey.read(str(key_file))
    with listening(key_file, count=2) as port:
        result = in_background(port.wait)
        first, again, other = (Visitor(port.address, key) for _ in range(3))
        first.say(rank=1)
        first.hear()
        first.close()
        time.sleep(0.1)
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


def test_another_model_on_another_host_is_refused_before_weights(
    key_file: Path, tmp_path: Path, members: list[Member], registry: Registry
) -> None:
    config = json.loads((Path(noise.OPTIONS["model"]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))
    asked = options(key_file)
    members.append(Member(str(asked.listen), key_file, f"--model={tmp_path}"))
    phases: list[str] = []
    with pytest.raises(EnginError, match=r"(?s)the ranks of this engine are not alike:.*checkpoint is \w+ on rank 1, and \w+ on"):
        Engine.build(asked, registry, lambda progress: phases.append(progress.phase))
    assert set(phases) == {"choice"}


def test_other_plugins_on_another_host_are_refused_before_weights(
    key_file: Path, tmp_path: Path, members: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is installed here alone."""
    (tmp_path / "only_here.py").write_text(
        "from enginery.api import SchedulePolicySpec, hookimpl\n"
        "@hookimpl\n"
        "def register_schedule_policies():\n"
        "    return [SchedulePolicySpec(name='here', api=(2, 0), key=lambda request: (0.0,), summary='')]\n"
    )
    info = tmp_path / "only-here-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: only-here\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[enginery]\nonly-here = only_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = options(key_file)
    members.append(Member(str(asked.listen), key_file))
    phases: list[str] = []
    with pytest.raises(EngineDied, match=r"(?s)rank 1 .* failed: this process does not have the plugins.*only-here.*not installed"):
        Engine.build(asked, Registry.load(), lambda progress: phases.append(progress.phase))
    assert set(phases) == {"choice"}


def test_page_sizes_that_differ_are_refused_on_both_ranks(registry: Registry) -> None:
    """Where all settings are compared, whoever is asked: over tcp, as between hosts."""
    store, address = listening_store("127.0.0.1", 2)

    def compare(rank: int) -> str:
        groups = RankGroups(
            store if rank == 0 else open_store(address, 2),
            ParallelFacts(tensor_size=2, tensor_rank=rank),
            host="127.0.0.1",
            standing=Standing(),
        )
        asked = EngineOptions(**{**OPTIONS, "page_size": 16 * (rank + 1)})
        with pytest.raises(ConfigError) as refused:
            groups.compare(choose(asked, registry, parallel=groups.parallel))
        return str(refused.value)

    with ThreadPoolExecutor(2) as threads:
        for said in threads.map(compare, range(2)):
            assert said == "the ranks of this engine are not alike:\n  - page_size is 32 on rank 1, and 16 on rank 0"


HERE = str(Path(__file__).parent)


@pytest.mark.parametrize(
    ("changes", "flags", "why"),
    [
        (
            {"model": "/nowhere/model"},
            (),
            "has no folder /nowhere/model, where the engine's model is; tell it another by engine rank --model",
        ),
        (
            {"model": HERE, "drafter": "eagle", "draft_model": "/nowhere/draft"},
            (),
            "has no folder /nowhere/draft, where the engine's draft model is; tell it another by engine rank --draft-model",
        ),
        ({"model": HERE}, ("--draft-model=x",), "was given the draft model x, and the engine has none; leave --draft-model out"),
    ],
    ids=["model", "draft model", "none"],
)
def test_a_model_that_is_not_on_the_other_host_is_named(
    changes: dict[str, str], flags: tuple[str, ...], why: str, key_file: Path, members: list[Member]
) -> None:
    """Told by the rank, and known to the engine as the cause."""
    boot = EngineOptions(**changes)
    with listening(key_file) as port:
        result = in_background(port.wait)
        members.append(Member(port.address, key_file, *flags))
        ranks = result()
        frame = msgspec.msgpack.encode(
            {"parallel": {}, "options": dataclasses.asdict(boot), "manifest": {"plugins": []}}
            | dict.fromkeys(("steps", "reports", "key", "meeting", "host", "log_level"), "")
            | {"beat_s": 0.5}
        )
        ranks.boot(1, frame)
        end_s = time.monotonic() + 20
        while not (deaths := ranks.poll()):
            assert time.monotonic() < end_s
            time.sleep(0.02)
        ranks.end(grace_s=0.0)
    assert why in deaths[0].how
    assert members[0].end()[0] == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"listen": None}, "--executor join waits for ranks of other hosts; say where, by --listen"),
        ({"rank_key_file": None}, "--listen without --rank-key-file lets nobody in"),
        ({"executor": "local"}, "--executor local starts them on this host"),
        ({"tp": 1}, "executor is 'join', but there is one rank"),
        ({"tp": 1, "executor": "local"}, "--listen and --rank-key-file are for other ranks, but there is one"),
        ({"listen": "tcp://0.0.0.0:5550"}, "every interface; but tensors are exchanged without keys"),
        ({"listen": "10.0.0.1:5550"}, "must be tcp://ADDRESS:PORT"),
        ({"listen": "tcp://192.0.2.1:5550"}, "ranks cannot join at tcp://192.0.2.1:5550: .*a free port of an address of this host"),
        ({"rank_key_file": "/nowhere/key"}, "the key of ranks cannot be read from /nowhere/key"),
    ],
    ids=str,
)
def test_what_cannot_be_joined_is_refused_at_once(changes: dict[str, object], why: str, key_file: Path, registry: Registry) -> None:
    with pytest.raises(ConfigError, match=why):
        Engine.build(options(key_file, **changes), registry)


def test_a_key_is_its_owner_s_and_never_written_over(tmp_path: Path) -> None:
    file = tmp_path / "ranks.key"
    make = [sys.executable, "-m", "enginery", "rank", "--new-key", str(file)]
    subprocess.run(make, check=True)
    assert file.stat().st_mode & 0o777 == 0o600
    key = RankKey.read(str(file)).text
    again = subprocess.run(make, capture_output=True, text=True, check=False)
    assert (again.returncode, RankKey.read(str(file)).text) == (2, key)
    assert "cannot be written: File exists; a key that is there already stays" in again.stderr
    file.write_text(key[:-1])
    with pytest.raises(ConfigError, match=r"ranks.key is no key of ranks; engine rank --new-key FILE makes one"):
        RankKey.read(str(file))


def test_replicas_listen_at_ports_of_their_own(key_file: Path) -> None:
    port = int(free_address().rpartition(":")[2])
    wires = TcpWires(f"tcp://127.0.0.1:{port}", RankKey.read(str(key_file)), deadline_s=20.0, replica=1)
    wires.close()
    assert wires.address == f"tcp://127.0.0.1:{port + 1}"


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
PROGRAM = str(Path(__file__).parent / "joined_engine.py")


@pytest.mark.usefixtures("own_processes")
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


@pytest.mark.usefixtures("own_processes")
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
