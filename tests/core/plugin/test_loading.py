"""Finding plugins, their statuses, and what happens to the ones that cannot be used."""

from __future__ import annotations

import sys
from dataclasses import asdict

import pytest
from core.plugin.loaded import backends, load, record_of

from enginery.cli.flags.plugins import blocked_names
from enginery.contracts.attention import AttnBackendSpec
from enginery.contracts.drafting import DrafterSpec, DraftModelOptions
from enginery.contracts.model import ModelSpec
from enginery.contracts.parallel import ExecutorSpec
from enginery.contracts.schedule import SchedulePolicySpec
from enginery.errors import ConfigError, PluginError
from enginery.plugin import loading
from enginery.plugin.records import PluginRecord, Status
from enginery.plugin.registry import Registry


def test_an_installed_plugin_is_loaded_with_its_distribution_and_version(site) -> None:
    site.install("fa-dist", site.backend("fa"), name="fa", version="1.2")
    assert record_of(load(), "fa") == PluginRecord(
        name="fa", distribution="fa-dist", version="1.2", status=Status.LOADED, offers=("attn-backend:fa",)
    )


def test_the_cores_own_parts_come_through_its_own_hooks(site) -> None:
    registry = load(no_plugins=True)
    assert [record.name for record in registry.records] == ["core"]
    assert {offer.name: offer.plugin for offer in registry.offers(SchedulePolicySpec)} == {"fcfs": "core", "shortest-first": "core"}
    assert {offer.name: offer.plugin for offer in registry.offers(ExecutorSpec)} == {"local": "core", "join": "core"}


def test_a_plugin_that_fails_to_import_is_a_row_with_file_and_line(site) -> None:
    site.install("bad", "x = 1\nimport nope_nope\n")
    site.install("good", site.backend("good"))
    registry = load()
    record = record_of(registry, "bad")
    assert record.status is Status.BROKEN
    assert "ModuleNotFoundError: No module named 'nope_nope'" in record.reason
    assert "bad/__init__.py, line 2" in record.reason
    assert backends(registry) == ["good"]


@pytest.mark.parametrize("code", ["def f(:\n", "raise SystemExit(3)\n", "1 / 0\n"], ids=["syntax", "exit", "zero"])
def test_whatever_a_plugin_does_when_imported_stops_nobody_else(site, code: str) -> None:
    site.install("bad", code)
    assert record_of(load(), "bad").status is Status.BROKEN


def test_an_import_that_is_interrupted_is_told_with_its_plugin(site, caplog: pytest.LogCaptureFixture) -> None:
    site.install("bad", "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load()
    assert caplog.messages == ["interrupted while plugin bad (bad==1.0) was imported"]


def test_descriptors_may_come_in_a_tuple(site) -> None:
    site.install("fa", site.backend("fa").replace("return [", "return *[").replace('a fake")]', 'a fake")],'))
    assert backends(load()) == ["fa"]


def test_a_hook_that_raises_makes_its_plugin_broken(site) -> None:
    site.install("bad", "from enginery.api import hookimpl\n@hookimpl\ndef register_models():\n    raise KeyError('x')\n")
    assert "KeyError: 'x' (" in record_of(load(), "bad").reason


def test_a_plugin_that_is_half_valid_leaves_no_trace(site) -> None:
    site.install("half", site.backend("fa") + "\n@hookimpl\ndef register_models(batch):\n    return []\n")
    registry = load()
    assert record_of(registry, "half").status is Status.BROKEN
    assert "parameter 'batch' is not in the hook's specification" in record_of(registry, "half").reason
    assert registry.offers(AttnBackendSpec) == ()
    assert registry.manager.get_plugin("half") is None


def test_a_misspelt_hook_is_reported_with_its_near_match(site) -> None:
    site.install("typo", site.backend("fa").replace("def register_attn_backends", "def register_attn_backend"))
    assert "did you mean register_attn_backends" in record_of(load(), "typo").reason


def test_a_plugin_without_hooks_is_broken(site) -> None:
    site.install("empty", "")
    assert "implements no hook" in record_of(load(), "empty").reason


def test_a_backend_that_nothing_builds_is_broken(site) -> None:
    site.install("fa", site.backend("fa").partition("@hookimpl\ndef create")[0])
    assert "there is no create_attn_backend to build it" in record_of(load(), "fa").reason


def test_a_descriptor_without_its_contract_version_is_broken(site) -> None:
    site.install("fa", site.backend("fa").replace("api=(2, 0), ", ""))
    record = record_of(load(), "fa")
    assert record.status is Status.BROKEN
    assert "api" in record.reason


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("api=(2, 0)", "api='1.0'", "api is '1.0'"),
        ("api=(2, 0)", "api=(2, -1)", "api is (2, -1), but must be two numbers, for instance"),
        ('name="fa"', 'name="f a"', "the name must be letters"),
        ('name="fa"', 'name="auto"', "and not auto"),
        ("priority=1", "priority='high'", "priority is 'high', but must be a whole number"),
        ("priority=1", "priority=1, prefill_priority='high'", "prefill_priority is 'high', but must be a whole number"),
        ("priority=1", "priority=1, single_priority=True", "single_priority is True, but must be a whole number"),
        ('summary="a fake"', "summary=None", "summary is None, but must be text"),
        ('summary="a fake"', 'summary="", refuse_also=[]', "refuse_also is [], but must be a function"),
        (' dtypes=frozenset({"float32"})', ' dtypes=frozenset({"fp32"})', "dtypes is ['fp32'], of which the engine knows none"),
        ('devices=frozenset({"cpu"})', 'devices=frozenset({"gpu"})', "it knows cpu, cuda"),
        ('devices=frozenset({"cpu"})', 'devices="cpu"', "capabilities.devices is 'cpu', but must be a frozenset"),
        ('devices=frozenset({"cpu"})', "devices=None", "capabilities.devices is None, but must be a frozenset"),
        ("capabilities=can", "capabilities=3", "which is no Capabilities"),
        ("capabilities=can", "capabilities=can, options=3", "options is 3, but must be a dataclass"),
    ],
)
def test_an_unusable_descriptor_is_refused_in_words(site, good: str, bad: str, message: str) -> None:
    site.install("fa", site.backend("fa").replace(good, bad))
    record = record_of(load(), "fa")
    assert record.status is Status.BROKEN
    assert message in record.reason


@pytest.mark.parametrize("answer", ["None", "{'fa': 1}", "[3]", "['fa']"])
def test_what_is_no_list_of_descriptors_is_refused(site, answer: str) -> None:
    site.install("fa", f"from enginery.api import hookimpl\n@hookimpl\ndef register_models():\n    return {answer}\n")
    status = record_of(load(), "fa").status
    assert status is Status.BROKEN


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        ("return [", "return {}; [", "register_attn_backends returned {}, but must return a list or a tuple"),
        ("priority=1", "priority='high'", "it registers what cannot be used:"),
        ("def register_attn_backends()", "def register_attn_backends(batch)", "does not fit the hooks of EngineHooks:"),
    ],
)
def test_why_a_plugin_is_broken_does_not_name_it_again(site, good: str, bad: str, said: str) -> None:
    site.install("fa", site.backend("fa").replace(good, bad))
    assert record_of(load(), "fa").reason.startswith(said)


def test_the_same_name_twice_in_one_plugin_is_refused(site) -> None:
    site.install("fa", site.backend("fa").replace("return [", "return 2 * ["))
    assert "attn-backend fa is registered 2 times" in record_of(load(), "fa").reason


def test_a_plugin_whose_requirement_excludes_this_core_is_incompatible_and_never_imported(site) -> None:
    package = site.install("old", "raise AssertionError", requires=["enginery<0.1", "torch>=2"])
    record = record_of(load(), "old")
    assert record.status is Status.INCOMPATIBLE
    assert "it needs enginery<0.1, this is enginery 0." in record.reason
    assert package not in sys.modules


@pytest.mark.parametrize(
    ("api", "fits"), [((2, 0), True), ((2, 1), True), ((2, 2), False), ((3, 0), False), ((1, 0), False), ((1, 9), False)]
)
def test_a_contract_of_another_major_or_a_later_minor_is_incompatible_with_both_numbers(site, api, fits: bool) -> None:
    site.install("fa", site.backend("fa").replace("(2, 0)", str(api)))
    registry = load()
    record = record_of(registry, "fa")
    if fits:
        assert record.status is Status.LOADED
        return
    assert record.status is Status.INCOMPATIBLE
    assert f"fa is written for attn-backend contract {api[0]}.{api[1]}, this core has 2.1" in record.reason
    assert registry.offers(AttnBackendSpec) == ()


def test_one_incompatible_descriptor_makes_the_whole_plugin_incompatible(site) -> None:
    two = site.backend("fa").replace(
        "return [", "more = AttnBackendSpec(name='fb', api=(7, 0), priority=1, capabilities=can, summary='')\n    return [more, "
    )
    site.install("fa", two)
    assert backends(load()) == []


@pytest.mark.parametrize("first", ["a-dist", "z-dist"])
def test_two_distributions_with_one_plugin_name_are_both_in_conflict_in_either_order(site, first: str) -> None:
    for distribution in (first, {"a-dist": "z-dist", "z-dist": "a-dist"}[first]):
        site.install(distribution, "raise AssertionError", name="flash")
    registry = load()
    rows = [record for record in registry.records if record.name == "flash"]
    assert [row.status for row in rows] == [Status.CONFLICT, Status.CONFLICT]
    assert all("a-dist 1.0 and z-dist 1.0 both provide a plugin named flash" in row.reason for row in rows)
    assert "a_dist" not in sys.modules


@pytest.mark.parametrize("names", [("one", "two"), ("two", "one")])
def test_two_plugins_with_one_backend_name_are_both_in_conflict_in_either_order(site, names) -> None:
    for name in names:
        site.install(name, site.backend("fa"))
    site.install("other", site.backend("fb"))
    registry = load()
    for name in names:
        record = record_of(registry, name)
        assert record.status is Status.CONFLICT
        assert "attn-backend fa is registered by plugin one (one==1.0) and plugin two (two==1.0)" in record.reason
    assert backends(registry) == ["fb"]


MODULE = """
from enginery.api import DrafterSpec, ModelSpec, hookimpl

MODEL = ModelSpec(name="mtp", api=(2, 0), architectures=({architecture!r},), describe=dict, build=list)

@hookimpl
def register_drafters():
    return [DrafterSpec(name="mtp", api=(2, 0), summary="", most=4, takes_features=True, suits=bool, model=MODEL)]
"""


@pytest.mark.parametrize(("second", "status"), [("Second", Status.LOADED), ("First", Status.CONFLICT)])
def test_drafters_in_checkpoints_share_a_name_but_no_architecture(site, second: str, status: Status) -> None:
    site.install("one", MODULE.format(architecture="First"))
    site.install("two", MODULE.format(architecture=second))
    registry = load()
    assert [record_of(registry, name).status for name in ("one", "two")] == [status, status]
    assert [offer.name for offer in registry.offers(DrafterSpec)] == [
        *["mtp"] * (2 if status is Status.LOADED else 0),
        "standalone",
    ]
    if status is Status.LOADED:
        (found,) = {Registry.load(options=["mtp.trees=true", "mtp.siblings=2"]).options_for("mtp")}
        assert isinstance(found, DraftModelOptions)
        assert found.num_siblings == 2, "usual options are shared with the name"


def test_blocking_one_of_two_in_conflict_frees_the_other(site) -> None:
    site.install("one", site.backend("fa"))
    site.install("two", site.backend("fa"))
    assert backends(load(blocked=["two"])) == ["fa"]


def test_a_name_of_the_core_stays_the_cores(site) -> None:
    code = """
    from enginery.api import SchedulePolicySpec, hookimpl
    @hookimpl
    def register_schedule_policies():
        return [SchedulePolicySpec(name="fcfs", api=(2, 0), key=lambda facts: (), summary="")]
    """
    site.install("thief", code)
    site.install("liar", code.replace("fcfs", "other"), name="core")
    registry = load()
    assert record_of(registry, "thief").status is Status.CONFLICT
    assert registry.schedule_policy("fcfs").plugin == "core"
    assert [record.status for record in registry.records if record.distribution == "liar"] == [Status.CONFLICT]
    assert {record.status for record in registry.records if record.distribution == "enginery"} == {Status.LOADED}


def test_two_plugins_for_one_architecture_are_both_live(site) -> None:
    code = """
    from enginery.api import ModelSpec, hookimpl
    @hookimpl
    def register_models():
        return [ModelSpec(name="{}", api=(2, 0), architectures=("LlamaForCausalLM",), describe=print, build=print)]
    """
    site.install("one", code.format("a"))
    site.install("two", code.format("b"))
    registry = load()
    assert [offer.name for offer in registry.offers(ModelSpec)] == ["a", "b"]
    assert {record_of(registry, name).status for name in ("one", "two")} == {Status.LOADED}


def test_two_entry_points_to_one_package_are_both_in_conflict(site) -> None:
    package = site.install("one", site.backend("fa"))
    site.install("two", "", value=package)
    registry = load()
    assert {record_of(registry, name).status for name in ("one", "two")} == {Status.CONFLICT}


@pytest.mark.parametrize("value", ["fa:Plugin", "fa:missing"])
def test_an_entry_point_to_something_other_than_a_package_is_broken(site, value: str) -> None:
    site.install("fa", "class Plugin: ...", value=value)
    assert "must name the package alone" in record_of(load(), "fa").reason


@pytest.mark.parametrize(("value", "missing"), [("not_there", "not_there"), ("fa.plugin", "fa.plugin"), ("not.there", "not")])
def test_an_entry_point_to_nothing_says_what_it_names_and_what_to_look_at(site, value: str, missing: str) -> None:
    site.install("fa", site.backend("fa"), value=value)
    advice = "see what `pip show -f fa` lists, and the packages in its pyproject.toml"
    told = f"its entry point is {value}, and no package {missing} is installed; {advice}"
    assert record_of(load(), "fa").reason == told


def test_pythons_own_frozen_modules_are_no_place_to_look(site) -> None:
    site.install("fa", value="fa.")
    assert "<frozen" not in record_of(load(), "fa").reason
    site.install("other", "import importlib\nimportlib.import_module('not_there_either')\n")
    told = record_of(load(), "other").reason
    assert "other/__init__.py, line 2" in told
    assert told.endswith("; its entry point is other")


def test_what_a_plugin_asks_of_torch_wrongly_is_told_with_the_plugins_line(site) -> None:
    site.install("fa", "import torch\n\ntorch.no_such_thing\n")
    assert "fa/__init__.py, line 3" in record_of(load(), "fa").reason


def test_a_blocked_plugin_is_never_imported(site) -> None:
    site.install("fa", "raise AssertionError")
    record = record_of(load(blocked=["fa"]), "fa")
    assert record.status is Status.BLOCKED
    assert "fa" not in sys.modules


def test_no_plugins_blocks_them_all_before_import(site) -> None:
    site.install("fa", "raise AssertionError")
    assert record_of(load(no_plugins=True), "fa").status is Status.BLOCKED


def test_plugins_are_blocked_and_switched_off_by_the_environment_too(site, monkeypatch) -> None:
    site.install("fa", site.backend("fa"))
    site.install("fb", site.backend("fb"))
    monkeypatch.setenv("ENGINERY_BLOCKED_PLUGINS", " fa , ")
    assert backends(load()) == ["fb"]
    monkeypatch.setenv("ENGINERY_NO_PLUGINS", "1")
    assert backends(load()) == []
    monkeypatch.setenv("ENGINERY_NO_PLUGINS", "perhaps")
    with pytest.raises(ConfigError, match="ENGINERY_NO_PLUGINS is 'perhaps'"):
        load()


def test_blocking_a_plugin_that_is_not_installed_is_an_error_with_near_matches(site) -> None:
    site.install("flash", site.backend("fa"))
    with pytest.raises(ConfigError, match=r"'flsh', to be blocked, is not installed; did you mean flash\?"):
        load(blocked=["flsh"])


def test_block_flags_are_read() -> None:
    assert blocked_names(["no:a", "no:b"]) == ("a", "b")
    for bad in ("a", "no:", "yes:a"):
        with pytest.raises(ConfigError, match=f"-p {bad} is not understood"):
            blocked_names([bad])


def test_strict_mode_makes_a_broken_plugin_fatal(site, monkeypatch) -> None:
    site.install("bad", "1 / 0")
    monkeypatch.setenv("ENGINERY_STRICT_PLUGINS", "1")
    with pytest.raises(PluginError, match=r"plugin bad \(bad==1.0\) is broken: ZeroDivisionError"):
        load()
    assert record_of(load(blocked=["bad"]), "bad").status is Status.BLOCKED


def test_a_plugin_for_devices_that_are_not_here_is_loaded_and_says_so(site, monkeypatch) -> None:
    site.install("fa", site.backend("fa").replace('devices=frozenset({"cpu"})', 'devices=frozenset({"cuda"})'))
    monkeypatch.setattr(loading, "present_devices", lambda: frozenset({"cpu"}))
    registry = load()
    assert record_of(registry, "fa").status is Status.NO_DEVICE
    assert record_of(registry, "fa").reason == "the backends run on cuda, this machine has cpu"
    assert backends(registry) == ["fa"]
    monkeypatch.setattr(loading, "present_devices", lambda: frozenset({"cpu", "cuda"}))
    assert record_of(load(), "fa").status is Status.LOADED


def test_hidden_gpus_are_no_device(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert loading.present_devices() == {"cpu"}


def test_registering_after_the_start_raises(site) -> None:
    with pytest.raises(PluginError, match="too late"):
        load().manager.register(object(), "late")


def test_records_do_not_depend_on_the_order_of_installation(site) -> None:
    names = ["b", "c", "a"]
    for name in names:
        site.install(name, site.backend(name))
    assert [asdict(record)["name"] for record in load().records] == ["core", "a", "b", "c"]
