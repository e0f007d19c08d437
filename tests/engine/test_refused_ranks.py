"""Ranks of other hosts that do not fit the engine, or an engine that none can join: what is refused, before weights are read."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import msgspec
import noise
import pytest
import torch
from engine import joined_members
from engine.joined_members import OPTIONS, Member, in_background, listening, options
from installed import install

from enginery.config.schema import EngineOptions
from enginery.contracts.drafting import DrafterSpec
from enginery.contracts.parallel import LaunchPlan, ParallelFacts
from enginery.contracts.weights import WeightFormatSpec
from enginery.engine.engine import Engine
from enginery.errors import ConfigError, EngineDied, EnginError
from enginery.plugin.registry import Registry
from enginery.worker.choice import Choice, choose
from enginery.worker.ranks.gloo import Standing, listening_store, open_store
from enginery.worker.ranks.groups import RankGroups

key_file, members = joined_members.key_file, joined_members.members  # fixtures


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
    assert set(phases) == {"ranks", "choice"}


def test_other_plugins_on_another_host_are_refused_before_weights(
    key_file: Path, tmp_path: Path, members: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is installed here alone."""
    code = (
        "from enginery.api import SchedulePolicySpec, hookimpl\n"
        "@hookimpl\n"
        "def register_schedule_policies():\n"
        "    return [SchedulePolicySpec(name='here', api=(2, 0), key=lambda request: (0.0,), summary='')]\n"
    )
    install(tmp_path, "only-here", "only_here", code)
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = options(key_file)
    members.append(Member(str(asked.listen), key_file))
    phases: list[str] = []
    with pytest.raises(EngineDied, match=r"(?s)rank 1 .* failed: this process does not have the plugins.*only-here.*not installed"):
        Engine.build(asked, Registry.load(), lambda progress: phases.append(progress.phase))
    assert set(phases) == {"ranks", "choice"}


def refused(choices: Sequence[Choice]) -> set[str]:
    """What ranks are told that have chosen these, over tcp, as between hosts."""
    store, address = listening_store("127.0.0.1")

    def compare(rank: int) -> str:
        groups = RankGroups(
            store if rank == 0 else open_store(address, 2),
            ParallelFacts(tensor_size=2, tensor_rank=rank),
            host="127.0.0.1",
            standing=Standing(),
        )
        with pytest.raises(ConfigError) as error:
            groups.compare(choices[rank])
        return str(error.value)

    with ThreadPoolExecutor(2) as threads:
        return set(threads.map(compare, range(2)))


def test_page_sizes_that_differ_are_refused_on_both_ranks(registry: Registry) -> None:
    """Where all settings are compared, whoever is asked."""
    both = [choose(EngineOptions(**{**OPTIONS, "page_size": size}), registry) for size in (16, 32)]
    assert refused(both) == {"the ranks of this engine are not alike:\n  - page_size is 32 on rank 1, and 16 on rank 0"}


@pytest.mark.parametrize("what", ["family", "vocabulary", "operations", "weight format", "device", "drafter", "python", "torch"])
def test_whatever_else_differs_is_refused_by_name(what: str, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    one = choose(EngineOptions(**OPTIONS), registry)
    other = {
        "family": {"family": replace(one.family, version="9")},
        "vocabulary": {"facts": replace(one.facts, vocab_size=99)},
        "operations": {"ops": one.ops[1:]},
        "weight format": {"weight_format": registry.offers(WeightFormatSpec)[0]},
        "device": {"device_facts": replace(one.device_facts, kind="cuda")},
        "drafter": {"drafter": registry.offers(DrafterSpec)[0]},
    }
    monkeypatch.setattr(platform, "python_version", iter(("3.11.1", "3.12.1") if what == "python" else ("3.11.1",) * 2).__next__)
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", Mock(__str__=Mock(side_effect=["2.12", "2.13"])))
    (said,) = refused([one, replace(one, **other.get(what, {}))])
    assert re.fullmatch(rf"the ranks of this engine are not alike:\n  - {what} is .* on rank 1, and .* on rank 0", said)


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
        ({"listen": "tcp://127.0.0.1:65535", "dp_rank": 3}, "replica 3 would listen at port 65538, but 65535 is the last"),
        ({"rank_key_file": "/nowhere/key"}, "the key of ranks cannot be read from /nowhere/key"),
    ],
    ids=str,
)
def test_what_cannot_be_joined_is_refused_at_once(changes: dict[str, object], why: str, key_file: Path, registry: Registry) -> None:
    with pytest.raises(ConfigError, match=why):
        Engine.build(options(key_file, **changes), registry)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"tp": 1, "pp": 2, "pp_layers": "a,b"},
            "pp_layers is 'a,b', but --pp is 2; give layers for each stage, as 16,16 for two",
        ),
        ({"tp": 1, "pp": 2, "pp_layers": "2,2,"}, "pp_layers is '2,2,', but --pp is 2"),
        ({"step_deadline": 0.0}, "step_deadline is 0.0, but must be positive"),
        ({"step_deadline": float("nan")}, "step_deadline is nan, but must be positive, and finite"),
        ({"kv_memory_gib": float("inf")}, "kv_memory_gib is inf, but must be positive, and finite"),
    ],
    ids=str,
)
def test_what_no_model_makes_right_is_refused_before_ranks_are_started(
    changes: dict[str, object], why: str, key_file: Path, registry: Registry
) -> None:
    started: list[LaunchPlan] = []
    changes = {"executor": "local", "listen": None, "rank_key_file": None, **changes}
    with pytest.raises(ConfigError, match=why):
        Engine.build(options(key_file, **changes), registry, launch=started.append)  # type: ignore[arg-type]  # it starts none
    assert not started
