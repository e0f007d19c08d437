"""A router that reads vLLM's KV events (`kv_router`) knows what the prefix cache has."""

from __future__ import annotations

import json
import random
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import noise
import pytest
from engine.kv_router import PAGE_SIZE, PATIENCE_MS, Prefix, Router
from engine.random_use import RandomUse, evict_everything
from engine.rank_models import CONFIGS
from engine.test_kinds_at_random import small_memory
from free_ports import free_ports
from integrity import descendants
from pairwise import EVERYTHING, spread

from enginery.config.schema import EngineOptions
from enginery.contracts.request import GenerationRequest, RequestOutput, SamplingParams
from enginery.engine.engine import Engine
from enginery.errors import ConfigError
from enginery.plugin.registry import Registry


def cached(engine: Engine, lane: int = 0) -> set[Prefix]:
    """What the prefix cache of a lane has: every prefix of whole pages."""
    found, page_bytes = set(), 4 * PAGE_SIZE
    root = engine._scheduling.caches[lane].root
    stack = [(child, branch[:-page_bytes].decode(), b"") for branch, child in root.children.items()]
    while stack:
        node, salt, before = stack.pop()
        for place in range(len(node.pages)):
            found.add((salt, tuple(array("i", before + node.tokens[: (place + 1) * page_bytes]))))
        stack += [(child, salt, before + node.tokens) for child in node.children.values()]
    return found


def resumable(engine: Engine, lane: int = 0) -> dict[str, set[Prefix]]:
    """By kind of memory beside the first, the blocks that resume points have: their prefixes."""
    found: dict[str, set[Prefix]] = {}
    root = engine._scheduling.caches[lane].root
    for node in descendants(root):
        if node.point is not None and not node.point.is_dropped:
            path, top = node.tokens, node
            while top.parent is not root:
                top = top.parent
                path = top.tokens + path
            salt, tokens = top.branch[: -4 * PAGE_SIZE].decode(), tuple(array("i", path))
            for kind, pages in node.point.pages.items():
                ends = range(len(tokens), len(tokens) - PAGE_SIZE * len(pages), -PAGE_SIZE)
                found.setdefault(kind, set()).update((salt, tokens[:end]) for end in ends)
    return found


def settled(router: Router, engine: Engine, lane: int = 0) -> None:
    """Until the router knows what the cache of that lane has."""
    engine.prepare()  # as a server does between steps
    content, deadline_s = (cached(engine, lane), resumable(engine, lane)), time.monotonic() + PATIENCE_MS / 1000
    while (set(router.blocks.values()), router.known_others()) != content:
        assert time.monotonic() < deadline_s
        router.listen(50)
        router.catch_up()  # what was sent before the subscription had arrived


@pytest.fixture
def addresses(tmp_path: Path) -> dict[str, str]:
    return {"kv_events": f"ipc://{tmp_path}/events", "kv_events_replay": f"ipc://{tmp_path}/replay"}


@pytest.fixture
def engine(registry: Registry, addresses: dict[str, str]) -> Iterator[Engine]:
    built = Engine.build(options(**addresses), registry)
    yield built
    built.close()


def options(**changes: object) -> EngineOptions:
    given = {**noise.OPTIONS, "device": "cpu", "dtype": "float32", "num_pages": 24, "page_size": PAGE_SIZE, "num_threads": 1}
    return EngineOptions(**{**given, "max_model_len": 64, "max_batch_tokens": 32, **changes})


def asked(name: str, prompt: tuple[int, ...], salt: str = "", num_tokens: int = 6) -> GenerationRequest:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    return GenerationRequest(request_id=name, prompt_token_ids=prompt, params=params, cache_salt=salt)


def run(engine: Engine, *requests: GenerationRequest) -> None:
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()


def test_a_router_s_view_is_the_cache_s_content_under_random_use(engine: Engine, addresses: dict[str, str]) -> None:
    """Shared beginnings, salts, aborts, preemption, eviction, and a reset amid it."""
    router, chance = Router(*addresses.values()), random.Random(3)

    def request(name: str) -> GenerationRequest:
        prompt = (5, 6, 7, 8) * chance.randrange(1, 4) + tuple(chance.choices(range(9, 12), k=chance.randrange(1, 20)))
        return asked(name, prompt, chance.choice(["", "", "one", "other"]), chance.randrange(1, 40))

    router.catch_up()
    use = RandomUse(engine, chance, request)
    for turn in range(300):
        if chance.random() < 0.6:
            use.submit()
        if use.alive and chance.random() < 0.05:
            use.abort_one()
        use.step()
        if turn in (100, 200):
            settled(router, engine)
        if turn == 150:
            engine.flush_prefix_cache()
    use.drain()
    settled(router, engine)
    assert engine.meter.stats().num_preempted > 0
    assert {"BlockStored", "BlockRemoved"} <= router.kinds
    assert router.salts == {"", "one", "other"}
    engine.flush_prefix_cache()
    settled(router, engine)
    assert router.blocks == {}
    router.close()


HYBRIDS = {  # groups beside the first, and options
    "gemma2": ({1: ("sliding_window", 16)}, {"num_pages": 40}),
    "jamba": ({1: ("mamba", None)}, {"num_pages": 40}),
    "qwen3_next": ({1: ("mamba", None)}, {"num_pages": 24}),
}


@pytest.mark.parametrize("name", spread(HYBRIDS, 2))
def test_a_router_knows_where_requests_go_on(
    name: str, registry: Registry, addresses: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tokens of a prompt are found as the events say. A window may be whole where no resume point ends: they say more."""
    groups, changes = HYBRIDS[name]
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    small_memory(monkeypatch, windows=14, states=6)
    engine = Engine.build(options(model=str(tmp_path), load_format="dummy", **changes, **addresses), registry)
    router, chance, found = Router(*addresses.values()), random.Random(3), []
    router.groups = dict(groups)
    for turn in range(60 if EVERYTHING else 24):
        prompt = (5, 6, 7, 8) * chance.randrange(1, 6) + tuple(chance.choices(range(9, 11), k=chance.randrange(1, 12)))
        salt = chance.choice(["", "", "one"])
        settled(router, engine)
        expected = router.goes_on_from(prompt, salt)
        engine.submit(asked(str(turn), prompt, salt, num_tokens=chance.choice([1, 1, 2, 9])))
        (cached_tokens,) = {output.num_cached_tokens for output in stepped(engine) if output.finish_reason is not None}
        found.append((cached_tokens, expected))
        if turn in (12, 30):
            evict_everything(engine)
        engine._scheduler.check_idle()
    router.catch_up()
    assert router.groups == groups
    assert all(told <= expected for told, expected in found)
    if (1, "mamba") in [(group, kind) for group, (kind, _) in groups.items()]:
        assert all(told == expected for told, expected in found)
    assert sum(told > 0 for told, _ in found) > 5
    engine.close()
    router.close()


def stepped(engine: Engine) -> Iterator[RequestOutput]:
    while engine.has_work:
        yield from engine.step()


def test_a_late_subscriber_gets_what_it_missed(engine: Engine, addresses: dict[str, str]) -> None:
    run(engine, asked("a", (1,) * 20), asked("b", (1,) * 8 + (2,) * 9, "salt"))
    run(engine, asked("c", (3,) * 40))
    late = Router(*addresses.values())
    late.catch_up()
    settled(late, engine)
    run(engine, asked("d", (1,) * 20 + (4,) * 9))
    settled(late, engine)
    late.close()


def test_a_reset_is_told_as_such(engine: Engine, addresses: dict[str, str]) -> None:
    router = Router(*addresses.values())
    run(engine, asked("a", (1,) * 20))
    settled(router, engine)
    router.kinds.clear()
    assert engine.flush_prefix_cache() > 0
    settled(router, engine)
    assert router.kinds == {"AllBlocksCleared"}
    router.close()


@pytest.mark.parametrize("name", ["deepseek-v2-lite-experts", "qwen3_next"])
def test_every_lane_tells_of_its_own_prefixes(name: str, registry: Registry, addresses: dict[str, str], tmp_path: Path) -> None:
    """As engines with numbers do in vLLM: under a rank and at an address of its own, each. The second of two replicas."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    asked_for = {"model": str(tmp_path), "load_format": "dummy", "num_pages": 40, "step_deadline": 20.0, **addresses}
    routers = [Router(*(f"{address}_dp{rank}" for address in addresses.values()), rank=rank) for rank in (2, 3)]
    engine = Engine.build(options(**asked_for, dp_attention=2, dp_rank=1), registry)
    try:
        for turn in range(3):
            run(engine, *(asked(f"{turn} {end}", (5, 6, 7, 8) * (turn + 1) + (end,) * 5, "s" * (end % 2)) for end in range(9, 15)))
        for lane, router in enumerate(routers):
            settled(router, engine, lane)
            assert router.blocks
        assert set(routers[0].blocks.values()) != set(routers[1].blocks.values())
        assert (name == "qwen3_next") == any(router.known_others() for router in routers)
        assert engine.flush_prefix_cache() > 0
        for lane, router in enumerate(routers):
            settled(router, engine, lane)
            assert "AllBlocksCleared" in router.kinds
            assert not router.blocks
    finally:
        engine.close()
        for router in routers:
            router.close()


def test_equal_prefixes_have_equal_hashes_in_every_engine(registry: Registry, tmp_path: Path) -> None:
    seen = []
    for number in range(2):
        places = {"kv_events": f"ipc://{tmp_path}/{number}", "kv_events_replay": f"ipc://{tmp_path}/replay{number}"}
        engine = Engine.build(options(**places, seed=number, kv_events_topic="kv@here"), registry)
        router = Router(*places.values(), topic="kv@here")
        run(engine, asked("a", (1,) * 20, "salt", 1), asked("b", (1,) * 20, "", 1))
        router.catch_up()
        settled(router, engine)
        seen.append(router.blocks)
        router.close()
        engine.close()
    assert seen[0] == seen[1]
    assert len(seen[0]) == 10, "salts are apart"


def test_a_replica_publishes_at_ports_of_its_own_under_its_number(registry: Registry) -> None:
    """As vLLM does: the port and the rank, of events and of what is published again."""
    port = free_ports(2)
    asked_for = {"kv_events": f"tcp://0.0.0.0:{port - 2}", "kv_events_replay": f"tcp://127.0.0.1:{port - 1}"}
    engine = Engine.build(options(**asked_for, dp_rank=2), registry)
    router = Router(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}", rank=2)
    run(engine, asked("a", (1,) * 20))
    router.catch_up()
    settled(router, engine)
    assert len(router.blocks) == 6, "of 20 tokens and the first 5 that were generated"
    router.close()
    engine.close()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kv_events": "udp://*:1"}, r"kv_events is 'udp://\*:1', but must be tcp://"),
        ({"kv_events": "tcp://*:65536"}, "cannot be published at port 65536: 65535 is the last"),
        ({"kv_events": "tcp://*:5557", "kv_events_replay": "tcp://*:65535", "dp_rank": 1}, "cannot be published at port 65536"),
        ({"kv_events_topic": "x"}, "kv_events_topic are of --kv-events, which is not given"),
        ({"kv_events": "tcp://*:5557", "prefix_cache": False}, "--no-prefix-cache turns off"),
    ],
    ids=str,
)
def test_what_cannot_be_published_is_refused(changes: dict[str, object], why: str, registry: Registry) -> None:
    with pytest.raises(ConfigError, match=why):
        Engine.build(options(**changes), registry)
