"""Rows of distributions that are installed wrongly: stale or damaged metadata, and those that register nothing."""

from __future__ import annotations

import pytest
from core.plugin.loaded import backends, load, record_of

from enginery.plugin.discovery import core_refusal
from enginery.plugin.records import Status


def test_requirements_of_extras_and_of_others_do_not_count() -> None:
    assert core_refusal(["enginery>=9; extra == 'later'", "enginery-x>=9", "enginery>=0.1"], "0.1.0") == ""
    assert core_refusal(["Enginery >= 2"], "2.0.0rc1") != ""
    assert core_refusal(["enginery>=1.0,<2"], "1.5.dev0") == ""


def test_stale_metadata_of_a_distribution_is_a_row_of_its_own(site) -> None:
    site.install("fa", site.backend("fa"), version="0.9")
    site.install("fa", site.backend("fa"), version="0.10")
    registry = load()
    live, stale = sorted((r for r in registry.records if r.name == "fa"), key=lambda record: record.status, reverse=True)
    assert (live.version, live.status) == ("0.10", Status.LOADED)
    assert (stale.version, stale.status) == ("0.9", Status.CONFLICT)
    assert "stale metadata" in stale.reason
    assert backends(registry) == ["fa"]


@pytest.mark.parametrize("metadata", ["", "Name: fa\n", "Metadata-Version: 2.1\nName: fa\nVersion: 1\nRequires-Dist: ???\n"])
def test_metadata_that_cannot_be_read_is_a_row(site, metadata: str) -> None:
    site.install("fa", site.backend("fa"), metadata=metadata)
    site.install("fb", site.backend("fb"))
    registry = load()
    assert record_of(registry, "fa").status is Status.BROKEN
    assert "cannot be read" in record_of(registry, "fa").reason
    assert backends(registry) == ["fb"]


def test_a_distribution_that_requires_enginery_and_registers_nothing_is_a_row_with_what_to_do(site) -> None:
    site.install("forgotten", "raise AssertionError", version="2.0", requires=["Enginery>=0.1"])
    (site.path / "forgotten-2.0.dist-info" / "entry_points.txt").write_text("[engineering]\nforgotten = forgotten\n")
    record = record_of(load(), "forgotten")
    assert (record.status, record.distribution, record.version) == (Status.UNREGISTERED, "forgotten", "2.0")
    assert "no entry point in the group enginery (it has engineering), so nothing of it is used" in record.reason
    assert "[project.entry-points.enginery]" in record.reason
    assert not record.is_live


@pytest.mark.parametrize("requires", ["enginery-attn-torch", "enginery; extra == 'fast'", "torch"])
def test_a_distribution_that_does_not_require_enginery_itself_is_no_row(site, requires: str) -> None:
    site.install("other", requires=[requires])
    (site.path / "other-1.0.dist-info" / "entry_points.txt").unlink()
    assert [record.name for record in load().records] == ["core"]


def test_a_plugin_that_does_register_something_has_no_second_row(site) -> None:
    site.install("fa", site.backend("fa"), requires=["enginery>=0.1"])
    assert [(record.name, record.status) for record in load().records] == [("core", Status.LOADED), ("fa", Status.LOADED)]


def test_an_unregistered_distribution_is_not_fatal_in_strict_mode_and_may_be_blocked(site, monkeypatch) -> None:
    site.install("forgotten", requires=["enginery"])
    (site.path / "forgotten-1.0.dist-info" / "entry_points.txt").unlink()
    monkeypatch.setenv("ENGINERY_STRICT_PLUGINS", "1")
    assert record_of(load(), "forgotten").status is Status.UNREGISTERED
