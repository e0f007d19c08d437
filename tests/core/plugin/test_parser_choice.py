"""Parsers are registered by plugins, and one of each kind is chosen for a checkpoint."""

from __future__ import annotations

import pytest

from enginery.api import Grammar, GrammarKind, ParserFacts, ParserSetup, ParserSpec, PluginError
from enginery.plugin.boundary import guarded_parser
from enginery.plugin.registry import Registry
from enginery.plugin.selection import choose_parser

FACTS = ParserFacts(architecture="A", chat_template="{{ '<call>' }}", added_tokens=frozenset({"<call>"}))
PLUGIN = """
from enginery.api import ParserSpec, hookimpl

@hookimpl
def register_parsers():
    def suits(facts):
        return SUITS
    return [ParserSpec(name="NAME", api=(2, 0), kind="KIND", summary="", suits=suits, make=print, priority=PRIORITY)]
"""


def install(site, name: str, *, kind: str = "tools", suits: str = "True", priority: int = 0) -> None:
    code = PLUGIN.replace("NAME", name).replace("KIND", kind).replace("SUITS", suits).replace("PRIORITY", str(priority))
    site.install(f"p-{name}", code)


def chosen(wanted: str, kind: str = "tools") -> str | None:
    registry = Registry.load()
    found = choose_parser(kind, wanted, FACTS, offers=registry.offers(ParserSpec), records=registry.records)
    return found and found.name


def test_hook_register_parsers(site) -> None:
    install(site, "x")
    (offer,) = Registry.load().offers(ParserSpec)
    assert isinstance(offer.spec, ParserSpec)
    assert offer.source == "plugin p-x (p-x==1.0)"


@pytest.mark.parametrize(("name", "kind"), [("x", "images"), ("none", "tools")])
def test_hook_register_parsers_refuses_other_kinds_and_the_name_of_no_parser(site, name: str, kind: str) -> None:
    install(site, name, kind=kind)
    (record,) = (record for record in Registry.load().records if record.name == f"p-{name}")
    assert f"kind is '{kind}', but must be tools or reasoning" in record.reason


def test_the_highest_priority_that_suits_is_taken(site) -> None:
    install(site, "other", suits="'<other>' in facts.chat_template", priority=9)
    install(site, "thoughts", kind="reasoning", priority=8)
    install(site, "plain", suits="'<call>' in facts.added_tokens")
    install(site, "better", suits="facts.architecture == 'A'", priority=1)
    assert chosen("auto") == "better"
    assert chosen("auto", "reasoning") == "thoughts"


def test_without_one_that_suits_there_is_no_parser(site) -> None:
    install(site, "other", suits="False")
    assert chosen("auto") is None
    assert chosen("auto", "reasoning") is None


def test_a_parser_asked_for_by_name_is_used_whether_it_suits_or_not(site) -> None:
    install(site, "other", suits="False")
    install(site, "plain")
    assert chosen("other") == "other"
    assert chosen("none") is None
    with pytest.raises(PluginError, match="no parser of tools 'plane'; did you mean plain"):
        chosen("plane")
    with pytest.raises(PluginError, match="no parser of reasoning 'plain'"):
        chosen("plain", "reasoning")


def test_a_parser_whose_rule_fails_is_named(site) -> None:
    install(site, "odd", suits="1 / 0")
    with pytest.raises(PluginError, match=r"plugin p-odd \(p-odd==1.0\) failed when asked whether parser odd suits") as caught:
        chosen("auto")
    said = str(caught.value)
    assert "ZeroDivisionError: division by zero (" in said
    assert said.endswith("line 7); name another parser of tools, or none")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


FAILING = """
from enginery.api import ParserSpec, hookimpl

class Parser:
    def __init__(self, setup):
        if not setup.tools:
            1 / 0
    def feed(self, text):
        1 / 0
    finish = None

@hookimpl
def register_parsers():
    suits = lambda facts: True
    is_inside = lambda prompt: 1 / 0
    return [ParserSpec(name="x", api=(2, 0), kind="reasoning", summary="", suits=suits, make=Parser, is_inside=is_inside)]
"""


WRONG = """
from enginery.api import ContentText, ParserSpec, hookimpl

class Parser:
    def __init__(self, setup):
        pass
    def feed(self, text):
        yield ContentText(text)
        1 / 0
    def finish(self):
        return "text"

def fail(*given, **named):
    1 / 0

@hookimpl
def register_parsers():
    suits = lambda facts: True
    forces = {"force": lambda *given, **named: "a grammar", "force_or_json": lambda grammar: fail, "tell": fail}
    return [ParserSpec(name="x", api=(2, 2), kind="tools", summary="", suits=suits, make=Parser, **forces)]
"""


def test_all_else_that_a_parser_does_wrong_is_its_plugin_s_too(site) -> None:
    site.install("p-x", WRONG)
    spec = guarded_parser(Registry.load().offers(ParserSpec)[0])
    parser = spec.make(ParserSetup(new_id=str))
    both = spec.force_or_json(Grammar(kind=GrammarKind.JSON_OBJECT))
    fails = {
        r"could not read an answer: ZeroDivisionError": lambda: parser.feed("x"),
        r"read 't' in an answer, which is no event of a parser": parser.finish,
        r"force returned 'a grammar', which is no Grammar": lambda: spec.force((), None, parallel=True, required=True),
        r"could not make a grammar of calls: ZeroDivisionError": lambda: both((), None, parallel=True, required=False),
        r"could not write a conversation: ZeroDivisionError": lambda: spec.tell("", (), ()),
    }
    for said, call in fails.items():
        with pytest.raises(PluginError, match=rf"plugin p-x \(p-x==1\.0\):? {said}"):
            call()


def test_a_parser_that_fails_is_named_with_its_plugin(site) -> None:
    site.install("p-x", FAILING)
    spec = guarded_parser(Registry.load().offers(ParserSpec)[0])
    assert spec.is_inside is not None
    parser = spec.make(ParserSetup(tools=("a tool",), new_id=str))
    for fails in (lambda: spec.make(ParserSetup(new_id=str)), lambda: spec.is_inside("x"), lambda: parser.feed("x"), parser.finish):
        with pytest.raises(PluginError, match=r"plugin p-x \(p-x==1.0\) could not .*: (ZeroDivision|Type)Error"):
            fails()
