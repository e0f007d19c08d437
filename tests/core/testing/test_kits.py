"""What the kits say of plugins that are wrong: the kind of fault, and what failing cases have in common."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable

import pytest
import torch
from core.testing.bad_backends import CAPABILITIES
from core.testing.good_backend import GoodBackend
from offers import op_offer, op_spec

from enginery.attention.watch import is_poison, poison
from enginery.contracts.attention import AttnBackendSpec, BackendContext, Reason
from enginery.contracts.ops import OpSpec
from enginery.contracts.parsers import ArgumentsText, ContentText, ParserSetup, ParserSpec, Tool, ToolCallBegun, ToolCallEnded
from enginery.contracts.versions import HookGroup
from enginery.errors import PluginError, Unsupported
from enginery.nn import reference_ops
from enginery.plugin.records import Offer
from enginery.testing.conformance import RULES, Check, Report, run_conformance
from enginery.testing.kits.checks import KitCheck, KitReport, run_checks
from enginery.testing.kits.ops import checks_of_ops
from enginery.testing.kits.parsers import ParserSuite, check_apart, check_cuts, check_order, check_plain, parsed
from enginery.testing.report import common_cause
from enginery.testing.rules import BrokenRule, Rule, compare
from enginery.testing.subject import Subject

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("run", "fault"),
    [
        (lambda: torch.no_such_thing, "AttributeError"),
        (lambda: compare((), (), dtype="no such", what="it"), "KeyError"),
        (lambda: json.loads("{"), "JSONDecodeError"),
    ],
    ids=["torch", "engine", "Python"],
)
def test_a_crash_is_told_with_the_line_of_the_plugin(run: Callable[[], object], fault: str) -> None:
    """Not with the line of torch, the engine or Python's library that it called."""
    row = KitCheck(rule="builds", case="it", run=run).row()
    assert f"{fault}: " in row.message
    assert f"({__file__}, line {run.__code__.co_firstlineno})" in row.message


def test_a_refusal_that_names_dtypes_is_no_wrong_dtype() -> None:
    def run() -> None:
        raise Unsupported("no attention backend can run this model:\n  - fla: dtype float32 is not among bfloat16")

    assert KitCheck(rule="builds", case="it", run=run).row().fault == "crash"


@pytest.mark.parametrize(
    ("raised", "is_advised"),
    [
        (NameError("pln"), False),
        (TypeError("pools are indexed by LocalLayerId"), False),
        (PluginError("it must write to `out`"), False),
        (RuntimeError("a copy from the device"), True),
    ],
)
def test_a_slip_of_its_author_does_not_get_the_advice_of_the_rule(raised: Exception, *, is_advised: bool) -> None:
    def check(subject: object, case: object) -> None:
        raise raised

    rule = Rule(name="plans", statement="A plan is pure.", advice="Keep the buffers.", scope=lambda subject: [None], check=check)
    row = Check(rule=rule, case=None).run(subject=None)
    assert f"Seen: {type(raised).__name__}: {raised} ({__file__}, line " in row.message
    assert ("Keep the buffers." in row.message) == is_advised


def cases(*texts: str) -> list[dict[str, str]]:
    return [dict(pair.split("=") for pair in text.split()) for text in texts]


@pytest.mark.parametrize(
    ("failed", "passed", "said"),
    [
        (("d=1 cap=2", "d=2 cap=2"), ("d=1", "d=2"), "all 2 failures have cap 2, none of the 2 others"),
        (("d=1 cap=2", "d=2 cap=3"), ("d=1", "d=2"), "all 2 failures have a cap, none of the 2 others"),
        (("d=1 t=x", "d=1 t=x k=1"), ("d=1 t=y", "d=2 t=x"), "all 2 failures have d 1 and t x, none of the 2 others"),
        (("d=1 cap=2",), ("d=1", "d=2"), ""),
        (("d=1",), ("d=2",), "the one failure has d 1, none of the 1 others"),
        (("d=1", "d=2"), ("d=1", "d=2"), ""),
        (("d=1",), (), ""),
        ((), ("d=1",), ""),
    ],
)
def test_what_failures_alone_have_in_common(failed: tuple[str, ...], passed: tuple[str, ...], said: str) -> None:
    if said.startswith("the one") or not said:
        assert common_cause(cases(*failed), cases(*passed)) in (said, "")
    else:
        assert common_cause(cases(*failed), cases(*passed)) == said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_was_not_written_is_told_from_a_nan_that_was(dtype: torch.dtype) -> None:
    out = poison(torch.empty(4, 2, 3, dtype=dtype))
    assert bool(out.isnan().all())
    out[1] = float("nan")
    out[2] = 1.0
    out[3] = torch.zeros(1, dtype=dtype) / 0 * torch.ones(1, dtype=dtype)
    assert is_poison(out).flatten(1).all(1).tolist() == [True, False, False, False]


def attending(change: Callable[..., None]) -> type:
    """The good backend with another `attend`, of the same parameters. change: is given what `attend` is."""

    @functools.wraps(GoodBackend.attend)
    def attend(self, *given):
        change(self, *given)

    return type(f"Bad_{change.__name__}", (GoodBackend,), {"attend": attend})


def forgets_the_softcap(self, *given):
    GoodBackend.attend(self, *given)
    layer, out = given[3], given[-1]
    if layer.facts.softcap is not None:
        out.mul_(1.5)


def writes_nothing(self, *given):
    return None


def writes_nan(self, *given):
    given[-1].copy_(torch.full_like(given[-1], float("nan")))


def crashes(self, *given):
    raise ZeroDivisionError("by design")


def mixes_dtypes(self, q, *given):
    q.double().flatten(1) @ q.flatten(1).T.to(torch.bfloat16)


def report_of(change: Callable[..., None], rule: str, **how: object) -> Report:
    def create(context: BackendContext) -> object:
        return attending(change)(context)

    spec = AttnBackendSpec(name="bad", api=(2, 0), priority=1, capabilities=CAPABILITIES, summary="")
    subject = Subject.imported("core.testing.good_backend:GOOD", device="cpu")
    offer = Offer(spec=spec, group=HookGroup.ATTN_BACKEND, name="bad", plugin="p", distribution="d", version="1")
    subject = Subject(offer=offer, create=create, device=CPU, options=subject.options, origin=subject.origin)
    return run_conformance(subject, rules=tuple(each for each in RULES if each.name == rule), **how)


@pytest.mark.parametrize(
    ("backend", "fault", "said"),
    [
        (writes_nothing, "nothing written", "rows of `out` unwritten"),
        (writes_nan, "NaN", "rows are NaN"),
        (crashes, "crash", "ZeroDivisionError: "),
        (mixes_dtypes, "wrong dtype", "RuntimeError: "),
        (forgets_the_softcap, "wrong numbers", "is off by"),
    ],
)
def test_each_kind_of_fault_has_its_word(backend: Callable[..., None], fault: str, said: str) -> None:
    rows = [row for row in report_of(backend, "numbers", stop_first=True).rows if row.outcome == "failed"]
    assert [row.fault for row in rows] == [fault]
    assert said in rows[0].message


def test_the_advice_is_what_the_failing_cases_alone_claim() -> None:
    report = report_of(forgets_the_softcap, "numbers")
    failed = report.count("failed")
    assert failed > 1
    (advice,) = report.advice()
    assert advice.startswith(f"numbers, wrong numbers: all {failed} failures have soft cap 2.0, none of the ")


def test_checks_can_be_chosen_by_words_and_end_at_the_first_failure() -> None:
    some = report_of(forgets_the_softcap, "numbers", only="numbers softcap float32")
    assert some.rows
    assert all("softcap" in row.case and "float32" in row.case for row in some.rows)
    assert len(report_of(forgets_the_softcap, "numbers", only="softcap", stop_first=True).rows) == 1


def offer(**loads: object) -> Offer[OpSpec]:
    return op_offer(op_spec(loads, name="mine"), plugin="p", distribution="d")


def tried(**loads: object) -> KitReport:
    return run_checks("mine", checks_of_ops(offer(**loads), device=CPU, dtypes=("float32", "bfloat16")))


def test_the_references_pass_their_own_kit() -> None:
    report = tried(**vars(reference_ops.reference_ops()))
    assert [row.message for row in report.rows if row.outcome == "failed"] == []
    assert report.count("passed") > 100


def test_an_operation_that_is_wrong_for_one_dtype_is_told_by_that() -> None:
    def gated_silu(x):
        return reference_ops.gated_silu(x) * (1.5 if x.dtype is torch.bfloat16 else 1)

    (advice,) = tried(gated_silu=gated_silu).advice()
    assert advice == "wrong numbers: all 6 failures have dtype bfloat16, 1 of the 10 others"


def test_an_operation_that_writes_to_what_it_only_reads_is_told() -> None:
    def gated_silu(x):
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate, inplace=True) * up

    messages = [row.message for row in tried(gated_silu=gated_silu).rows if row.outcome == "failed"]
    assert messages
    assert all("input 0 after the call is off by " in message for message in messages)


class UnaddingRouter:
    """A product that takes the norm before it, and forgets to add."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.product = reference_ops.bind_router(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return reference_ops.rms_norm(x, weight, eps)


def bound_together(bind: Callable[..., Callable[..., torch.Tensor]]) -> Callable[..., Callable[..., torch.Tensor]]:
    """What is bound last answers for all."""
    last: list[Callable[..., torch.Tensor]] = []

    def bind_again(*given: object) -> Callable[..., torch.Tensor]:
        last[:] = [bind(*given)]
        return lambda *inputs: last[0](*inputs)

    return functools.wraps(bind)(bind_again)


def sampled_as(op: str, row: int, *columns: int) -> Callable[..., torch.Tensor]:
    """All rows with these parameters of one."""

    def sample(logits, draws):
        table = draws.table.clone()
        table[list(columns)] = table[list(columns), row][:, None]
        return getattr(reference_ops, op)(logits, dataclasses.replace(draws, table=table))

    return sample


DRAWS = ("sample_rows", "draw_rows")


def embed_each_once(table, ids):
    rows = torch.zeros_like(table).index_put((ids,), table[ids] / ids.bincount(minlength=len(table))[ids, None])
    return rows[ids]


@pytest.mark.parametrize(
    ("op", "function", "said"),
    [
        *((op, sampled_as(op, row, column), "mixed ") for op in DRAWS for row in (0, -1) for column in range(4)),
        ("sample_rows", lambda logits, draws: reference_ops.sample_rows(logits[:1].expand_as(logits), draws), "mixed "),
        ("draw_rows", lambda logits, draws: reference_ops.draw_rows(logits[:1].expand_as(logits), draws), "mixed "),
        ("greedy", lambda logits: logits.shape[1] - 1 - logits.flip(1).argmax(1), "tied True"),
        ("greedy", lambda logits: logits.nan_to_num(neginf=0).argmax(1), "tied True"),
        ("greedy", lambda logits: logits.as_strided(logits.shape, (logits.shape[1], 1)).argmax(1), "rows 2, size 64"),
        ("embed", embed_each_once, "num_ids 3"),
        ("bind_linear", bound_together(reference_ops.bind_linear), "sizes 32x48"),
        ("bind_experts", bound_together(reference_ops.bind_experts), "experts 4"),
    ],
)
def test_an_operation_that_mixes_up_rows_or_weights_is_caught(op: str, function, said: str) -> None:
    failed = [row.case for row in tried(**{op: function}).rows if row.outcome == "failed"]
    assert any(said in case for case in failed), failed
    assert op not in DRAWS or all(said in case for case in failed)


@pytest.mark.parametrize(
    ("op", "function", "fault"),
    [
        ("bind_router", UnaddingRouter, "wrong numbers"),
        ("gated_silu", lambda x: reference_ops.gated_silu(x).double(), "wrong dtype"),
        ("gated_silu", lambda x: reference_ops.gated_silu(x) / 0 * 0, "NaN"),
        ("gated_silu", lambda x: x.nope(), "crash"),
        ("add_rms_norm", lambda x, residual, weight, eps: reference_ops.rms_norm(x + residual, weight, eps), "wrong numbers"),
        ("greedy", lambda logits: logits.argmax(-1) * 0, "wrong numbers"),
        ("embed", lambda table: table, "broken"),  # an argument is missing, so nothing else is tried
    ],
)
def test_a_wrong_operation_is_caught_with_the_kind_of_its_fault(op: str, function, fault: str) -> None:
    assert fault in {row.fault for row in tried(**{op: function}).rows if row.outcome == "failed"}


def test_what_keeps_a_set_from_being_loaded_is_told_once() -> None:
    def load(needs):
        raise RuntimeError("the library is not there")

    broken = offer(greedy=reference_ops.greedy)
    broken = dataclasses.replace(broken, spec=dataclasses.replace(broken.spec, load=load))
    for report in (run_checks("mine", checks_of_ops(broken, device=CPU)), tried(greedy=lambda: None)):
        (row,) = report.rows
        assert (row.rule, row.case, row.outcome) == ("loads", "float32", "failed")
        assert row.message.endswith("\nThe other checks need this one; the command does not run them.")


def test_a_set_that_refuses_every_dtype_says_why() -> None:
    def refuse(needs):
        return [Reason(rule="device", text="runs on abacuses")]

    refusing = offer(greedy=reference_ops.greedy)
    refusing = dataclasses.replace(refusing, spec=dataclasses.replace(refusing.spec, refuse=refuse))
    with pytest.raises(Unsupported, match=r"operations 'mine', from plugin p \(d==1\), refuse cpu: runs on abacuses"):
        checks_of_ops(refusing, device=CPU)


class Dropping:
    """A parser that loses what it holds back."""

    def __init__(self, setup: ParserSetup) -> None:
        self.held = ""

    def feed(self, text: str) -> list[ContentText]:
        kept, self.held = (text[:-1], text[-1]) if text.endswith("<") else (text, "")
        return [ContentText(kept)]

    def finish(self) -> list[ContentText]:
        return []


class ByPiece(Dropping):
    """A parser that looks for its tag in each piece alone."""

    def feed(self, text: str) -> list[ContentText]:
        return [ContentText(text.replace("<t>", ""))]


class Unended(Dropping):
    def feed(self, text: str) -> list[ToolCallBegun]:
        return [ToolCallBegun(0, "id", "tool")]


class Shared(Dropping):
    """Parsers that share what they hold back."""

    held = ""

    def __init__(self, setup: ParserSetup) -> None:
        Shared.held = ""

    def feed(self, text: str) -> list[ContentText]:
        Shared.held += text
        return []

    def finish(self) -> list[ContentText]:
        return [ContentText(self.held)]


class ByPieceInside(Dropping):
    """A parser that looks for its tag in each piece alone where the prompt ends within reasoning."""

    def __init__(self, setup: ParserSetup) -> None:
        self.inside, self.text = setup.inside, ""

    def feed(self, text: str) -> list[ContentText]:
        self.text += text.replace("<t>", "") if self.inside else text
        return []

    def finish(self) -> list[ContentText]:
        return [ContentText(self.text.replace("</t>", ""))]


def parser_of(make: type) -> ParserSpec:
    return ParserSpec(name="x", api=(2, 0), kind="tools", summary="", suits=lambda facts: False, make=make)


def test_a_parser_that_breaks_a_rule_is_caught_by_it() -> None:
    with pytest.raises(BrokenRule, match="nothing of the format"):
        check_plain(parser_of(Dropping), "a <")
    with pytest.raises(BrokenRule, match=r"cut as .* gives"):
        check_cuts(parser_of(ByPiece), "a <t> b")
    with pytest.raises(BrokenRule, match="begun and never ended"):
        check_order(parsed(parser_of(Unended), ["a"]), tools=[Tool(name="tool")])
    with pytest.raises(BrokenRule, match="out of place"):
        check_order([ToolCallBegun(0, "id", "another")], tools=[Tool(name="tool")])
    with pytest.raises(BrokenRule, match="not what it says"):
        check_order([ToolCallBegun(0, "id", "t"), ArgumentsText(0, "{"), ToolCallEnded(0, True)], tools=[Tool(name="t")])
    calls = [event for index in (0, 1) for event in (ToolCallBegun(index, "id", "t"), ToolCallEnded(index, False))]
    with pytest.raises(BrokenRule, match=r"index=1.* is out of place"):
        check_order(calls, tools=[Tool(name="t")])
    with pytest.raises(BrokenRule, match="by turns"):
        check_apart(parser_of(Shared), "one", "other")
    with pytest.raises(BrokenRule, match="cut as"):
        suite_of(ByPieceInside, "a <t> b").test_any_cut_gives_the_same_events()
    with pytest.raises(BrokenRule, match="by turns"):
        suite_of(Shared, "one").test_answers_that_are_read_by_turns_do_not_mix()


def suite_of(make: type, *texts: str) -> ParserSuite:
    """Of a parser of reasoning."""
    spec = dataclasses.replace(parser_of(make), kind="reasoning", is_inside=lambda prompt: True)
    return type("Suite", (ParserSuite,), {"parser": spec, "texts": texts})()
