"""A child process loads exactly what its parent's manifest says, and says so."""

from __future__ import annotations

import shutil
from dataclasses import replace

import msgspec
import pytest

from enginery.api import AttnNeeds, PluginError
from enginery.plugin.manifest import Manifest
from enginery.plugin.records import Status
from enginery.plugin.registry import Registry

CHILD = """
import sys, msgspec
from enginery.errors import EnginError
from enginery.plugin.manifest import Manifest
from enginery.plugin.registry import Registry
try:
    registry = Registry.replay(msgspec.json.decode({text!r}, type=Manifest))
except EnginError as error:
    sys.exit(str(error))
print(registry.manifest.digest())
print(sorted(name for name in sys.modules if name in ("one", "two", "torch")))
"""


def child_of(site, manifest: Manifest):
    return site.run(CHILD.replace("{text!r}", repr(msgspec.json.encode(manifest).decode())), is_fresh=True)


def test_a_child_process_loads_what_the_parent_did_and_reports_the_same_digest(site) -> None:
    site.install("one", site.backend("a"))
    site.install("two", site.backend("b"))
    parent = Registry.load(blocked=["two"]).manifest
    done = child_of(site, parent)
    assert done.stdout.splitlines() == [parent.digest(), "['one']"], done.stderr


def test_a_child_process_is_not_swayed_by_its_environment(site, monkeypatch) -> None:
    site.install("one", site.backend("a"))
    parent = Registry.load().manifest
    monkeypatch.setenv("ENGINERY_BLOCKED_PLUGINS", "one")
    assert Registry.replay(parent).manifest == parent


def test_options_are_replayed(site) -> None:
    options = "from dataclasses import dataclass\n@dataclass\nclass Options:\n    size: int = 1\n"
    site.install("one", options + site.backend("a").replace("capabilities=can", "capabilities=can, options=Options"))
    parent = Registry.load(options=["a.size=7"])
    assert Registry.replay(parent.manifest).options_for("a") == parent.options_for("a")
    assert Registry.load().manifest.digest() != parent.manifest.digest()


def test_a_plugin_that_the_manifest_does_not_name_is_not_imported(site) -> None:
    parent = Registry.load().manifest
    site.install("one", "raise AssertionError")
    (record,) = (record for record in Registry.replay(parent).records if record.name == "one")
    assert record.status is Status.AVAILABLE


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"blocked": ["one"]}, "blocked: -p no:one or ENGINERY_BLOCKED_PLUGINS names it; leave that out to use it"),
        ({"no_plugins": True}, "blocked: --no-plugins or ENGINERY_NO_PLUGINS is set; leave that out to use it"),
    ],
)
def test_a_child_says_of_what_is_blocked_what_the_user_did(site, given, reason: str) -> None:
    site.install("one", site.backend("a"))
    parent = Registry.load(**given)
    manifest = msgspec.msgpack.decode(msgspec.msgpack.encode(parent.manifest), type=Manifest)
    child = Registry.replay(manifest)
    assert child.records == parent.records
    assert child.manifest.digest() == manifest.digest()
    needs = AttnNeeds(device="cpu", dtype="float32", kv_dtype="float32", page_size=16, layers=())
    with pytest.raises(PluginError) as caught:
        child.select_attn_backend("auto", needs)
    assert f"plugin one (one==1.0) might offer it but is {reason}" in str(caught.value)


def test_a_child_says_of_what_is_broken_what_its_parent_said(site) -> None:
    site.install("bad", "1 / 0")
    parent = Registry.load()
    assert Registry.replay(parent.manifest).records == parent.records


def test_every_difference_is_fatal_and_in_one_report(site) -> None:
    for name in ("gone", "newer", "other", "bad"):
        site.install(name, site.backend(name))
    parent = Registry.load().manifest
    shutil.rmtree(site.path / "gone-1.0.dist-info")
    (site.path / "newer-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: newer\nVersion: 1.1\n")
    (site.path / "other" / "__init__.py").write_text(site.backend("renamed"))
    (site.path / "bad" / "__init__.py").write_text("1 / 0")
    done = child_of(site, parent)
    assert done.returncode == 1
    for text in (
        "plugin gone (gone==1.0) is not installed",
        "plugin newer (newer==1.0) is newer==1.1",
        "plugin other (other==1.0) offers attn-backend:renamed instead of attn-backend:other",
        "plugin bad (bad==1.0) is broken: ZeroDivisionError",
    ):
        assert text in done.stderr


def test_a_core_of_another_version_is_a_difference(site) -> None:
    manifest = Registry.load().manifest
    (core,) = manifest.plugins
    with pytest.raises(PluginError, match=r"plugin core \(enginery==9\) is enginery=="):
        Registry.replay(replace(manifest, plugins=(replace(core, version="9"),)))


def test_a_manifest_travels_as_json_and_msgpack(site) -> None:
    site.install("one", site.backend("a"))
    manifest = Registry.load().manifest
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest) == manifest
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest) == manifest
