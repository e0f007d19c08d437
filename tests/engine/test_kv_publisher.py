"""The thread that publishes KV events: replay, what waits, addresses; without an engine."""

from __future__ import annotations

import dataclasses
import time
from array import array
from pathlib import Path

import msgspec
import pytest
import zmq
from engine.kv_router import PAGE_SIZE, PATIENCE_MS, Router
from zmq.utils.monitor import recv_monitor_message

from enginery.config.schema import EngineOptions
from enginery.engine.kv_events import publisher
from enginery.engine.kv_events.blocks import Blocks, groups_of
from enginery.engine.kv_events.publisher import KVEvents, address_of, binds
from enginery.engine.kv_events.schema import BlockStored
from enginery.errors import ConfigError

SLOWLY_READ = 2000
ONE_KIND = groups_of(has_latents=False, window=None, has_states=False)


def published_at(folder: Path) -> EngineOptions:
    return EngineOptions(kv_events=f"ipc://{folder}/events", kv_events_replay=f"ipc://{folder}/replay", page_size=PAGE_SIZE)


class HeldThread:
    """The publisher's thread begins its work when it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._closed = True
        run = publisher._Publisher.run

        def held(own: publisher._Publisher, waiting: object) -> None:
            while self._closed:
                time.sleep(0.01)
            run(own, waiting)

        monkeypatch.setattr(publisher._Publisher, "run", held)

    def open(self) -> None:
        self._closed = False


def told_from(asker: zmq.Socket[bytes], first: int, wait_s: float = 0.0) -> list[bytes]:
    """Numbers of the batches that are kept from this one on, and the end's."""
    asker.send_multipart([b"", first.to_bytes(8, "big")])
    time.sleep(wait_s)
    told: list[bytes] = []
    while publisher.END_OF_REPLAY not in told[-1:] and asker.poll(PATIENCE_MS):
        told.append(asker.recv_multipart()[1])
    return told


def test_whoever_reads_slowly_gets_all_that_is_kept(tmp_path: Path) -> None:
    """More batches than wait between two sockets that have ZeroMQ's own limits."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    asked = published_at(tmp_path)
    kv = KVEvents(asked, medium="CPU", groups=ONE_KIND)
    try:
        for number in range(SLOWLY_READ):
            kv.stored(None, array("i", [number] * 64 * PAGE_SIZE).tobytes(), range(64), "")
            kv.publish()
            while kv._waiting.qsize() > 50:
                time.sleep(0.001)
        asker = context.socket(zmq.DEALER)
        asker.set_hwm(1)
        asker.connect(asked.kv_events_replay)
        end_s = time.monotonic() + PATIENCE_MS / 1000
        while len(told_from(asker, SLOWLY_READ - 1)) == 1:  # what was published last is not kept yet
            assert time.monotonic() < end_s
        told = told_from(asker, 0, wait_s=0.5)  # by then a queue of 1,000 would be full
        assert told == [*(number.to_bytes(8, "big") for number in range(SLOWLY_READ)), publisher.END_OF_REPLAY]
    finally:
        kv.close()
        context.destroy(linger=0)


def test_a_step_waits_for_nobody_and_too_much_is_told_as_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of changes behind what was dropped nothing is told, or a router would not know where they belong."""
    monkeypatch.setattr(publisher, "_LOOK_S", 0.01)
    gate = HeldThread(monkeypatch)
    asked = published_at(tmp_path)
    events = KVEvents(asked, medium="CPU", groups=ONE_KIND, most_waiting=3)
    block = array("i", (1, 2, 3, 4)).tobytes()
    events.publish()
    for page in range(4):
        events.stored(page - 1 if page else None, block, (page,), "")
        events.publish()
    assert "3 steps of KV events wait" in caplog.text
    events.stored(3, block, (4,), "")
    events.removed((2,))
    events.stored(None, block, (5,), "")
    events.publish()
    gate.open()
    router = Router(asked.kv_events, asked.kv_events_replay)
    deadline_s = time.monotonic() + 20
    while not router.blocks:
        assert time.monotonic() < deadline_s
        router.catch_up()
    assert list(router.blocks.values()) == [("", (1, 2, 3, 4))]
    router.close()
    events.close()


def test_who_knew_the_engine_before_a_restart_is_told_that_nothing_is_cached(tmp_path: Path) -> None:
    """Without asking for what was missed: routers of vLLM's events may not. The connection comes back after the engine began."""
    asked, block = published_at(tmp_path), array("i", (1, 2, 3, 4)).tobytes()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.SUB)
    router.reconnect_ivl = 300
    router.subscribe("")
    connected = router.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    router.connect(asked.kv_events)
    try:
        for _ in range(2):
            engine = KVEvents(asked, medium="CPU", groups=ONE_KIND)
            engine.publish()  # as in its first idle moment
            assert connected.poll(PATIENCE_MS)
            recv_monitor_message(connected)
            assert not router.poll(200)  # meanwhile it tells what it subscribes to
            engine.stored(None, block, (1,), "")
            engine.publish()
            assert router.poll(PATIENCE_MS)
            _, number, batch = router.recv_multipart()
            kinds = [event["type"] for event in msgspec.msgpack.decode(batch)[1]]
            assert (int.from_bytes(number, "big"), kinds) == (0, ["AllBlocksCleared", "BlockStored"])
            engine.close()
    finally:
        router.disable_monitor()
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("tcp://*:5557", "tcp://*:5560"),
        ("tcp://[::]:1", "tcp://[::]:4"),
        ("tcp://*:65532", "tcp://*:65535"),
        ("ipc:///run/events", "ipc:///run/events_dp3"),
    ],
)
def test_an_address_of_a_replica(address: str, found: str) -> None:
    assert address_of(address, 0) == address
    assert address_of(address, 3) == found
    with pytest.raises(ConfigError, match="has no port that number 3 could count from"):
        address_of("tcp://host", 3)


def test_a_subscriber_is_connected_to_where_the_address_is_none_of_this_host() -> None:
    assert all(map(binds, ("tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "ipc:///run/events")))
    assert not binds("tcp://router:5557")


def test_a_salt_is_told_of_the_first_block_alone() -> None:
    """As vLLM has it: the others follow that one."""
    blocks = Blocks(ONE_KIND, page_size=4, medium="CPU")
    tokens = array("i", range(8)).tobytes()
    told = [*blocks.stored(None, tokens, (1, 2), "salt"), *blocks.stored(2, tokens, (3, 4), "salt")]
    assert [event.extra_keys for event in told if isinstance(event, BlockStored)] == [[["salt"], None], None]


def test_what_waits_when_it_ends_gives_way_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_END_S", 0.05)
    gate = HeldThread(monkeypatch)
    events = KVEvents(published_at(tmp_path), medium="CPU", groups=ONE_KIND, most_waiting=2)
    for page in range(2):
        events.stored(None, array("i", (1, 2, 3, page)).tobytes(), (page,), "")
        events.publish()
    events.close()
    gate.open()
    events._thread.join(20)
    events.close()
    assert not events._thread.is_alive()


def test_an_address_that_is_taken_is_named(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.REP) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        asked = dataclasses.replace(published_at(tmp_path), kv_events_replay=f"tcp://127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=f"cannot be published at .*:{port}.*in use"):
            KVEvents(asked, medium="CPU", groups=ONE_KIND)
