"""What Ray Serve's YAML and its command line say of an engine, as options of `engine serve`. Needs no Ray."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from enginery_executor_ray.arguments import ON_ALONE, OR_OFF, SWITCHES, environ_of, number_on_node, options_of, own_and_flags

PAGE = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()


def test_arguments_are_options_and_true_and_false_are_switches() -> None:
    """A file of Ray Serve's has numbers and booleans; a command line has words."""
    given = {"tp": 2, "ep": "true", "prefix_cache": False, "model": "m", "memory_fraction": 0.5, "served_model_name": "true"}
    own = ["--memory-fraction=0.5", "--served-model-name=true"]
    assert options_of(given) == ["--tp=2", "--ep", "--no-prefix-cache", "--model=m", *own]
    off = {"ep": False, "no_plugins": "false", "check-attention": False, "revision": None, "overlap": "False"}
    assert options_of({**off, "allow_origin": ["a", "b"]}) == ["--no-overlap", "--allow-origin=a", "--allow-origin=b"]


@pytest.mark.parametrize("name", ["drafter", "sparse_coordinator", "sparse-coordinator"])
def test_off_is_a_word_though_yaml_reads_it_as_false(name: str) -> None:
    assert options_of({name: False}) == options_of({name: "off"}) == [f"--{name.replace('_', '-')}=off"]


def test_lists_of_a_file_of_config_are_options_too() -> None:
    given = {"blocked_plugins": ["web", "echo"], "plugin_options": ["suffix.a=1,2"], "record_steps": [4, "steps"]}
    assert options_of(given) == ["-pno:web", "-pno:echo", "--option=suffix.a=1,2", "--record-steps", "4", "steps"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"drafter": True}, "drafter is True, but must be a word or a number. YAML reads on, off, .* put quotes"),
        ({"tool_parser": False}, "tool_parser is False, but must be a word or a number. YAML"),
        ({"tp": {"size": 2}}, r"tp is \{'size': 2\}, but must be a word or a number"),
        ({"allow_origin": [["a"]]}, r"allow_origin is \['a'\], but"),
        ({"graphs": 0}, "graphs is 0, but must be true or false"),
        ({"ep": "yes"}, "ep is 'yes', but must be true or false"),
        ({"prefix-cache": [True]}, r"prefix_cache is \[True\], but must be true or false"),
        ({"min_replica": 2}, "there is no option --min-replica"),
        ({"no_such": "off"}, "there is no option --no-such"),
        ({"min_replicas": True}, "min_replicas is True, but must be a whole number from 1 on"),
        ({"min-replicas": 2, "max-replicas": 1}, "max_replicas is 1, but min_replicas 2"),
        ({"api-key-file": "k"}, "api_key_file: Ray Serve listens"),
    ],
)
def test_a_value_that_cannot_be_is_refused_before_anything_starts(given: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        own_and_flags({"model": "m", **given})


def test_null_is_as_if_it_were_left_out() -> None:
    own, flags = own_and_flags({"max_replicas": None, "min_replicas": 2, "gpus": None, "drafter": None, "port": None})
    assert (own["min_replicas"], own["max_replicas"], own["gpus"], flags) == (2, 2, 0, {})


def test_variables_of_what_is_refused_do_not_reach_an_engine() -> None:
    """With keys of any source its metrics would be refused, by which Ray Serve knows how many engines there are to be."""
    refused = {"ENGINERY_API_KEY": "k", "ENGINERY_API_KEY_FILE": "f", "ENGINERY_DP": "2", "ENGINERY_SSL_CERTFILE": "c"}
    kept = {"ENGINERY_MODEL": "m", "PORT": "1", "PATH": "p"}
    assert environ_of({**refused, **kept}) == kept


@pytest.mark.parametrize(
    ("more", "apart"), [({}, 2), ({"max_replicas": 4}, 8), ({"max_replicas": "2", "dp_attention": 2}, 8), ({"min_replicas": 3}, 6)]
)
def test_replicas_on_a_node_have_ports_of_kv_events_that_do_not_meet(more: dict[str, object], apart: int) -> None:
    """Those that a redeploy ends are still there when the next begin."""
    events = {"kv_events": "tcp://*:5600", **more}
    own_and_flags({**events, "kv_events_replay": f"tcp://*:{5600 + apart}"})
    with pytest.raises(ValueError, match=f"kv_events tcp://.*:5600 and kv_events_replay .*; name ports {apart} apart"):
        own_and_flags({**events, "kv_events_replay": f"tcp://*:{5600 + apart - 1}"})


def test_numbers_on_a_node_are_the_lowest_that_are_free() -> None:
    events = "tcp://*:5600/" + "long" * 50
    (first, one), (second, two) = number_on_node(events), number_on_node(events)
    other, three = number_on_node("tcp://*:5700")
    assert (first, second, other) == (0, 1, 0)
    one.close()
    again, four = number_on_node(events)
    assert again == 0
    for each in (two, three, four):
        each.close()


def test_options_are_of_the_kinds_that_the_page_of_all_options_says() -> None:
    """Switches that are left out when false have no --no- form, and the others are all that have one."""
    both = {name.replace("-", "_") for name in re.findall(r"`--([a-z-]+)`, `--no-\1`", PAGE)}
    assert both == SWITCHES
    assert all(f"`--{name.replace('_', '-')}` |" in PAGE for name in ON_ALONE)
    assert {name.replace("-", "_") for name in re.findall(r"`--([a-z-]+)`[ A-Z]*\| off \|", PAGE)} == OR_OFF
