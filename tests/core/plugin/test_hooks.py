"""One test for each hook of the engine scope: that a plugin's implementation is called, with what, and how it may fail."""

from __future__ import annotations

import dataclasses
import logging
import re
import sys

import pytest
import typer
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from enginery import api
from enginery.api import PluginError, QueuedFacts, StepReport
from enginery.cli.main import add_commands
from enginery.contracts.drafting import DrafterSpec
from enginery.contracts.grammars import GrammarSpec
from enginery.contracts.parallel import ExecutorSpec
from enginery.contracts.schedule import PageCounts
from enginery.contracts.weights import WeightFormatSpec
from enginery.plugin.boundary import guarded_policy
from enginery.plugin.groups import GROUPS
from enginery.plugin.registry import Registry

REPORT = StepReport(
    step=3,
    num_running=1,
    num_waiting=0,
    num_tokens=1,
    num_prefill_tokens=0,
    num_preempted=0,
    free_pages=1,
    cached_pages=0,
    total_pages=1,
    captured=False,
    attn_backend="x",
    schedule_s=0.0,
    plan_s=0.0,
    run_s=0.0,
)


def registering(hook: str, kind: str, **fields: str) -> str:
    """A plugin whose `hook` returns one descriptor of type `kind` named x."""
    rest = "".join(f", {name}={value}" for name, value in fields.items())
    return f"""
from pathlib import Path
from enginery.cli.main import add_commands
from enginery.api import {kind}, hookimpl

@hookimpl
def {hook}() -> list[{kind}]:
    return [{kind}(name="x", api=(2, 0){rest})]
"""


def offers_of(site, code: str) -> tuple[str, ...]:
    site.install("p", code, version="3.1")
    (record,) = (record for record in Registry.load().records if record.name == "p")
    assert not record.reason
    return record.offers


def test_hook_register_attn_backends(site) -> None:
    assert offers_of(site, site.backend("x")) == ("attn-backend:x",)


def test_hook_create_attn_backend(site) -> None:
    site.install("one", site.backend("a", package="one"))
    site.install("two", site.backend("b", package="two"))
    registry = Registry.load()
    assert registry.create_attn_backend("a", "context") == ("one", "a", "context")
    assert registry.create_attn_backend("b", "context") == ("two", "b", "context")
    with pytest.raises(PluginError, match="no attention backend 'c'"):
        registry.create_attn_backend("c", "context")


def test_hook_create_attn_backend_that_answers_none_is_an_error_naming_the_plugin(site) -> None:
    site.install("one", site.backend("a").replace('return ("', 'return None and ("'), version="3.1")
    with pytest.raises(PluginError, match=r"plugin one \(one==3.1\) registers attn-backend 'a', but .* answered None"):
        Registry.load().create_attn_backend("a", "context")


def test_hook_create_attn_backend_that_raises_is_an_error_naming_the_plugin_with_its_cause(site) -> None:
    site.install("one", site.backend("a").replace("return (", "raise KeyError('gpu')\n    return ("), version="3.1")
    with pytest.raises(PluginError, match=r"plugin one \(one==3.1\) could not build attn-backend 'a': KeyError: 'gpu'") as caught:
        Registry.load().create_attn_backend("a", "context")
    assert isinstance(caught.value.__cause__, KeyError)


def test_hook_register_sparse_coordinators(site) -> None:
    code = registering("register_sparse_coordinators", "SparseCoordinatorSpec", summary="''")
    create = "\n@hookimpl\ndef create_sparse_coordinator(context):\n    return context\n"
    assert offers_of(site, code + create) == ("sparse-coordinator:x",)


def test_hook_register_sparse_coordinators_takes_one_per_plugin(site) -> None:
    code = registering("register_sparse_coordinators", "SparseCoordinatorSpec", summary="''")
    two = code.replace("]\n", ", SparseCoordinatorSpec(name='y', api=(2, 0), summary='')]\n")
    site.install("p", two + "\n@hookimpl\ndef create_sparse_coordinator(context):\n    return context\n")
    assert "one per plugin" in Registry.load().records[1].reason


def test_hook_create_sparse_coordinator(site) -> None:
    code = registering("register_sparse_coordinators", "SparseCoordinatorSpec", summary="''")
    for name in ("one", "two"):
        made = f"SimpleNamespace(coordinator_id={name!r}, context=context)"
        create = f"\nfrom types import SimpleNamespace\n@hookimpl\ndef create_sparse_coordinator(context):\n    return {made}\n"
        site.install(name, code.replace('"x"', f'"of-{name}"') + create)
    registry = Registry.load()
    assert vars(registry.create_sparse_coordinator("of-two", "c")) == {"coordinator_id": "two", "context": "c"}
    assert vars(registry.create_sparse_coordinator("of-one", "c")) == {"coordinator_id": "one", "context": "c"}


def test_hook_register_models(site) -> None:
    code = registering("register_models", "ModelSpec", architectures="('A',)", describe="print", build="print")
    assert offers_of(site, code) == ("model:x",)


def test_hook_register_checkpoints(site) -> None:
    code = registering("register_checkpoints", "CheckpointSpec", priority="1", folder="Path('f')", note="''")
    assert offers_of(site, code) == ("checkpoint:x",)


def test_hook_register_ops(site) -> None:
    code = registering("register_ops", "OpSpec", priority="1", provides="('rms_norm',)", refuse="print", load="print")
    assert offers_of(site, code) == ("op:x",)


def test_hook_register_weight_formats(site) -> None:
    fields = dict(priority="0", summary="''", methods="('x',)", reads="print", refuse="print", load="print")
    site.install("p", registering("register_weight_formats", "WeightFormatSpec", **fields))
    assert [offer.name for offer in Registry.load().offers(WeightFormatSpec)] == ["x"]


def test_hook_register_grammars(site) -> None:
    fields = dict(priority="1", summary="''", kinds="frozenset({'regex'})", refuse="list", load="list")
    site.install("p", registering("register_grammars", "GrammarSpec", **fields))
    assert [offer.name for offer in Registry.load().offers(GrammarSpec)] == ["x"]


def test_hook_register_grammars_checks_the_kinds(site) -> None:
    fields = dict(priority="1", summary="''", kinds="['regex']", refuse="list", load="list")
    site.install("p", registering("register_grammars", "GrammarSpec", **fields))
    registry = Registry.load()
    assert registry.offers(GrammarSpec) == ()
    assert "kinds is ['regex'], but must be a frozenset" in next(record.reason for record in registry.records if record.name == "p")


def test_hook_register_drafters(site) -> None:
    site.install("p", registering("register_drafters", "DrafterSpec", summary="''", most="4", build="list"))
    assert [offer.name for offer in Registry.load().offers(DrafterSpec)] == ["standalone", "x"]


@pytest.mark.parametrize("most", ["0", "'4'", "True"])
def test_hook_register_drafters_checks_how_many(site, most: str) -> None:
    site.install("p", registering("register_drafters", "DrafterSpec", summary="''", most=most, build="list"))
    registry = Registry.load()
    assert [offer.name for offer in registry.offers(DrafterSpec)] == ["standalone"]
    assert f"most is {most}, but must be a whole number" in next(each.reason for each in registry.records if each.name == "p")


def test_hook_register_executors(site) -> None:
    site.install("p", registering("register_executors", "ExecutorSpec", summary="''", launch="list"))
    assert [offer.name for offer in Registry.load().offers(ExecutorSpec)] == ["join", "local", "x"]


def test_hook_register_schedule_policies(site) -> None:
    code = registering("register_schedule_policies", "SchedulePolicySpec", key="lambda r: (r.num_tokens,)", summary="''")
    assert offers_of(site, code) == ("schedule-policy:x",)


AGING = """
from dataclasses import dataclass
from enginery.api import QueuedFacts, SchedulePolicySpec, hookimpl

@dataclass(frozen=True)
class Options:
    level_s: float = 5.0

def key(request):
    return (request.arrival_s + request.options.level_s * request.priority,)

@hookimpl
def register_schedule_policies():
    return [SchedulePolicySpec(name="aging", api=(2, 1), key=key, summary="", options=Options)]
"""


@pytest.mark.parametrize(("options", "place"), [([], 11.0), (["aging.level_s=0.5"], 2.0)])
def test_a_schedule_policy_has_options(site, options: list[str], place: float) -> None:
    site.install("p", AGING)
    registry = Registry.load(options=options)
    policy = guarded_policy(registry.schedule_policy("aging"), registry.options_for("aging"))
    assert policy.key(QueuedFacts(request_id="a", priority=2, arrival_s=1.0, num_tokens=9)) == (place,)


def test_hook_register_schedule_policies_of_the_core(site) -> None:
    early = QueuedFacts(request_id="a", priority=0, arrival_s=1.0, num_tokens=9)
    short = QueuedFacts(request_id="b", priority=0, arrival_s=2.0, num_tokens=1)
    urgent = QueuedFacts(request_id="c", priority=-1, arrival_s=3.0, num_tokens=5)
    registry = Registry.load()
    for name, order in (("fcfs", "cab"), ("shortest-first", "cba")):
        queue = sorted([short, early, urgent], key=registry.schedule_policy(name).spec.key)
        assert "".join(facts.request_id for facts in queue) == order


COMMANDS = """
from enginery.cli.main import add_commands
from enginery.api import hookimpl

@hookimpl
def register_commands(app):
    @app.command()
    def NAME():
        print("hello from NAME")
    LAST
"""


def test_hook_register_commands(site, caplog) -> None:
    site.install("good", COMMANDS.replace("NAME", "greet_all").replace("LAST", ""))
    site.install("thief", COMMANDS.replace("NAME", "serve").replace("LAST", ""))
    site.install("late", COMMANDS.replace("NAME", "half").replace("LAST", "raise OSError('late')"))
    app = typer.Typer()
    app.command()(serve := lambda: print("ours"))
    app.registered_commands[0].name = "serve"
    assert serve is not None
    registry = Registry.load()
    with caplog.at_level(logging.WARNING):
        add_commands(registry, app)
    assert CliRunner().invoke(app, ["greet-all"]).output == "hello from greet_all\n"
    assert CliRunner().invoke(app, ["serve"]).output == "ours\n"
    assert [info.name or info.callback.__name__ for info in app.registered_commands] == ["serve", "greet_all"]
    assert "commands of plugin thief (thief==1.0) are left out: PluginError: the name serve is taken" in caplog.text
    assert "commands of plugin late (late==1.0) are left out: OSError: late" in caplog.text


ROUTES = """
from enginery.cli.main import add_commands
from enginery.api import hookimpl

@hookimpl
def register_routes(router, engine):
    @router.get("/NAME")
    def answer():
        return {"engine": engine}
"""


ALSO_COMMANDS = """
@hookimpl
def register_commands(app):
    pass
"""


def test_hook_register_routes(site, caplog) -> None:
    site.install("asked", ROUTES.replace("NAME", "asked") + ALSO_COMMANDS)
    site.install("other", ROUTES.replace("NAME", "other") + ALSO_COMMANDS)
    site.install("page", ROUTES.replace("NAME", "page"))
    site.install("bad", ROUTES.replace("NAME", "bad").replace("    @router", "    1 / 0\n    @router"))
    registry, router, app = Registry.load(), APIRouter(), FastAPI()
    with caplog.at_level(logging.WARNING):
        added = registry.register_routes(["asked"], router, "an engine")
    assert [(record.name, [route.path for route in own.routes]) for record, own in added] == [
        ("asked", ["/asked"]),
        ("page", ["/page"]),
    ]
    assert "routes of plugin bad (bad==1.0) are left out: ZeroDivisionError" in caplog.text
    app.include_router(router)
    client = TestClient(app)
    assert client.get("/asked").json() == client.get("/page").json() == {"engine": "an engine"}
    assert client.get("/other").status_code == 404
    with pytest.raises(PluginError, match=r"no plugin with routes named 'askd'; did you mean asked\?"):
        registry.register_routes(["askd"], router, None)
    with pytest.raises(PluginError, match=r"plugin bad \(bad==1.0\) could not add its routes: ZeroDivisionError"):
        registry.register_routes(["bad"], router, None)


OBSERVER = """
from enginery.cli.main import add_commands
from enginery.api import hookimpl
seen = []

@hookimpl
def observe_step(report):
    seen.append(report.step)
    LAST
"""


def test_hook_observe_step(site, caplog) -> None:
    site.install("good", OBSERVER.replace("LAST", ""))
    site.install("bad", OBSERVER.replace("LAST", "raise KeyError('x')"), version="3.1")
    registry = Registry.load()
    with caplog.at_level(logging.ERROR):
        registry.observers.report(REPORT)
        registry.observers.report(REPORT)
    modules = {name: registry.manager.get_plugin(name) for name in ("good", "bad")}
    assert modules["good"].seen == [3, 3]
    assert modules["bad"].seen == [3]
    assert [record.message for record in caplog.records] == [
        "observe_step of plugin bad (bad==3.1) failed at step 3; it is switched off"
    ]


def test_what_an_observer_changes_the_next_does_not_see(site) -> None:
    """Reports can be written as JSON too, by `asdict`."""
    site.install("first", OBSERVER.replace("LAST", "report.pages.clear()"))
    site.install("later", OBSERVER.replace("LAST", "from dataclasses import asdict; seen.append(asdict(report))"))
    registry, report = Registry.load(), dataclasses.replace(REPORT, pages={"full": PageCounts(free=1, cached=2, total=3)})
    registry.observers.report(report)
    (_, seen) = registry.manager.get_plugin("later").seen
    assert seen == dataclasses.asdict(report)
    assert seen["pages"]["full"]["total"] == 3


def test_hook_observe_step_costs_nothing_when_nobody_observes(site) -> None:
    site.install("fa", site.backend("fa"))
    registry = Registry.load()
    assert not registry.observers
    registry.manager.add_hookcall_monitoring(pytest.fail, lambda *rest: None)
    registry.observers.report(REPORT)


def test_the_types_of_descriptors_fields_are_in_the_api() -> None:
    """Those of the contracts: authors implement them, or are given them."""
    named = set[str]()
    for group in GROUPS.values():
        known = vars(sys.modules[group.descriptor.__module__])
        words = re.findall(r"[A-Z]\w+", " ".join(group.descriptor.__annotations__.values()))
        types = {word: known[word] for word in words if isinstance(known.get(word), type)}
        named |= {word for word, found in types.items() if found.__module__.startswith("enginery.contracts.")}
    assert named - vars(api).keys() == set()
    assert "KernelStore" in named
