"""The kit passes a correct backend, and catches each bad one by the rule that it breaks."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from core.testing import bad_backends
from core.testing.bad_backends import BAD
from core.testing.good_backend import GoodBackend
from few_checks import few
from pairwise import EVERYTHING

from enginery.attention.wrapper import Wrapper
from enginery.contracts.attention import AttnLayerFacts, AttnNeeds, BackendContext, Capabilities, Reason
from enginery.contracts.batch import Phase
from enginery.contracts.memory import RecurrentFacts, RecurrentWeights
from enginery.errors import Unsupported
from enginery.testing import reference
from enginery.testing.cases import claimed_kinds, covering, unclaimed
from enginery.testing.conformance import RULES, Check, Row, checks_of, run_conformance
from enginery.testing.subject import Subject, usual_cases
from enginery.testing.suite import AttnBackendSuite

for name in ("bad_plans", "bad_verification"):  # which add theirs to BAD
    importlib.import_module(f"core.testing.{name}")
OFFERS = [(rule, path) for rule, paths in BAD.items() for path in paths]
ON_CUDA_ONLY = {"captured-equals-eager", "mixed-captured"}


class TestGood(AttnBackendSuite):
    backend = "core.testing.good_backend:GOOD"

    @classmethod
    def checks(cls, subject: Subject) -> list[Check]:
        return few(checks_of(subject))


@pytest.mark.parametrize("page_size", [1, 128])
def test_a_backend_of_one_page_size_is_tried_on_it(page_size: int) -> None:
    subject = claiming(page_sizes=frozenset({page_size}))
    needing_room = {"long-tail", "padded-equals-unpadded", "prefix-hit", "batch-invariance", "plan-a-plan-b-run-a"}
    rules = tuple(rule for rule in RULES if rule.name in needing_room)
    rows = run_conformance(subject, rules=rules, only="" if EVERYTHING else "softmax").rows
    assert [row.message for row in rows if row.outcome == "failed"] == []
    assert {row.rule for row in rows if row.outcome == "passed"} > needing_room - {"batch-invariance"}
    assert all(
        f"page {page_size}, " in row.case for row in rows if row.outcome == "passed" and row.case and "attention," not in row.case
    )


@pytest.mark.parametrize(("claims", "failed"), [({}, False), ({"trees": False}, True)], ids=["as the inner one", "less"])
def test_a_wrapper_s_hooks_are_those_of_what_it_wraps(claims: dict[str, object], *, failed: bool) -> None:
    class Watching(Wrapper):
        def __init__(self, context: BackendContext) -> None:
            super().__init__(GoodBackend(context))

    subject = claiming(graphs=False, **claims)
    rule = next(rule for rule in RULES if rule.name == "hooks")
    rows = run_conformance(dataclasses.replace(subject, create=Watching), rules=(rule,)).rows
    assert {row.outcome for row in rows} == {"failed" if failed else "passed"}, [row.message for row in rows]


def claiming(**capabilities: object) -> Subject:
    """The good backend with other claims."""
    subject = Subject.imported("core.testing.good_backend:GOOD", device="cpu")
    can = dataclasses.replace(subject.can, **capabilities)
    return dataclasses.replace(
        subject, offer=dataclasses.replace(subject.offer, spec=dataclasses.replace(subject.offer.spec, capabilities=can))
    )


@functools.cache
def broken(path: str, rule: str) -> list[Row]:
    """The rows of one rule that failed; on a CPU the first of them. Both who ask have `PREPARED`."""
    (chosen,) = (each for each in RULES if each.name == rule)
    report = run_conformance(Subject.imported(path, device="cpu"), rules=(chosen,), stop_first=not EVERYTHING)
    return [row for row in report.rows if row.outcome == "failed"]


@pytest.mark.parametrize(("rule", "path"), OFFERS, ids=[path.partition(":")[2].removesuffix("_OFFER") for _, path in OFFERS])
def test_a_bad_backend_is_caught_by_the_rule_that_it_breaks(rule: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_backends, "PREPARED", [True])
    rows = broken(path, rule)
    assert rows, f"{path} passes {rule}"
    (statement,) = (each.statement for each in RULES if each.name == rule)
    for row in rows:
        assert row.message.startswith(f"{rule}: {statement}")
        assert row.case in row.message


def test_every_rule_catches_something() -> None:
    assert BAD.keys() | ON_CUDA_ONLY == {rule.name for rule in RULES}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("WrongArgumentName", "parameter 'forward_batch' is not in the hook's specification; it can ask for batch, capture"),
        ("ExtraRequiredArgument", "parameter 'stream' is not in the hook's specification"),
        ("NeverPlans", "has no @hookimpl plan_forward_metadata"),
        ("AttendWantsMore", "must take q, k, v, layer, batch, plan, out, in this order, and need no more"),
        (
            "AttendRenamesArguments",
            "forward_batch, plan, output) -> 'None' of AttendRenamesArguments must take q, k, v, layer",
        ),
        ("ClaimsRaggedWithoutHook", "mla_ragged=True, and the backend has no init_mha_chunk_metadata"),
        ("HasUnclaimedHook", "mla_ragged=False, and the backend has init_mha_chunk_metadata"),
        ("RefusesWhatItClaims", "dtype bfloat16 is always refused (bfloat16 is not done yet)"),
        ("RefusesEverything", "refuses everything that it claims"),
        ("RefusesNoPageSize", "not refused, though not claimed: page size (refuse answers [])"),
        ("ConditionalAttributes", "page_buffer exists for"),
        ("AttributesAppearLater", "last_layer comes or goes when a batch is planned and attended"),
        ("NeedsItsParent", "a new process ends with status 1: "),
        ("LosesTheLastPage", "is off by"),
        ("FailsOnAHeadDim", "RuntimeError"),
        ("WritesOutsideOfOut", "writes outside of `out`"),
        ("ReturnsBaseTwo", "wrong in base e, which capabilities state, but right in base 2"),
        ("SaysZeroForNothing", "must have an output of 0 and a log-sum-exp of -inf"),
        ("PlansCanBeChanged", "setting a_new_attribute of a Open computes"),
        ("KeepsThePlan", "batch A after both were planned"),
        ("Ignores_epoch", "with a plan of another epoch it computes"),
        ("Ignores_backend", "with another instance's plan it computes"),
        ("Ignores_phase", "with the plan of a batch of another phase it computes"),
        ("Ignores_num_tokens", "with the plan of a batch with fewer tokens it computes"),
        ("Ignores_num_requests", "with the plan of a batch with fewer requests it computes"),
        ("PlansForItselfIfNobodyDid", "with no plan it computes"),
        ("ComplainsInItsOwnWords", "with no plan it raises AssertionError"),
        ("ReadsAList", "Tensor.tolist is called in"),
        ("IndexesByAMask", "torch.index with a mask is called in"),
    ],
)
def test_the_message_says_what_was_seen(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_backends, "PREPARED", [True])
    rule, path = next(offer for offer in OFFERS if offer[1].endswith(f":{name}_OFFER"))
    assert said in " ".join(row.message for row in broken(path, rule))


def test_after_broken_hooks_nothing_else_is_run_and_each_rule_says_why() -> None:
    report = run_conformance(Subject.imported("core.testing.bad_backends:NeverPlans_OFFER", device="cpu"))
    assert {row.outcome for row in report.rows if row.rule == "hooks"} == {"failed"}
    assert {(row.outcome, row.message) for row in report.rows if row.rule != "hooks"} == {("skipped", "the rule hooks is broken")}


def test_every_rule_has_a_row_and_every_skipped_one_a_reason() -> None:
    subject = claiming(phases=frozenset({Phase.DECODE}), mla_ragged=False, lse_base=None)
    assert {check.rule.name for check in checks_of(subject)} == {rule.name for rule in RULES}
    quick = tuple(rule for rule in RULES if rule.name in ("chunked-equals-whole", "log-sum-exp", "captured-equals-eager"))
    report = run_conformance(subject, rules=quick)
    assert {row.outcome for row in report.rows} == {"skipped"}
    assert all(row.message for row in report.rows)
    assert "capabilities do not claim phase prefill" in {row.message for row in report.rows}
    assert json.loads(json.dumps(report.as_data()))["rows"][0]["rule"] == "chunked-equals-whole"


def test_a_backend_may_refuse_numbers_of_heads_which_no_capability_tells() -> None:
    def refuse_odd_groups(needs: AttnNeeds) -> list[Reason]:
        odd = [layer for layer in needs.layers if layer.num_heads // layer.num_kv_heads not in (1, 2)]
        return [Reason(rule="heads", text="6 and 7 query heads a KV head are not done yet")] * bool(odd)

    good = claiming()
    spec = dataclasses.replace(good.offer.spec, refuse_also=refuse_odd_groups)
    subject = dataclasses.replace(good, offer=dataclasses.replace(good.offer, spec=spec))
    (rule,) = (each for each in RULES if each.name == "claims")
    assert {row.outcome for row in run_conformance(subject, rules=(rule,)).rows} == {"passed"}


def test_only_the_suite_and_the_fixtures_import_pytest() -> None:
    folder = Path(reference.__file__).parent
    assert sorted(path.name for path in folder.glob("*.py") if "import pytest" in path.read_text()) == ["fixtures.py", "suite.py"]


def test_a_device_that_is_not_claimed_is_refused() -> None:
    with pytest.raises(Unsupported, match="good is for cpu, not for cuda"):
        Subject.imported("core.testing.good_backend:GOOD", device="cuda")


def test_any_two_claimed_values_meet_in_a_case() -> None:
    for kind in claimed_kinds(bad_backends.CAPABILITIES):
        rows = [row for row, _ in kind.rows()]
        chosen = covering(rows)
        assert len(chosen) < len(rows) / 3
        wanted = {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}
        assert wanted == {pair for row in chosen for pair in itertools.combinations(enumerate(row), 2)}


def test_what_is_not_claimed_is_asked_for_one_thing_at_a_time() -> None:
    least = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32"}),
        kv_dtypes=frozenset({"float32"}),
        phases=frozenset({Phase.DECODE}),
        head_dims=frozenset({16}),
        page_sizes=frozenset({16}),
        max_compute_capability=(9, 0),
    )
    subject = claiming(**vars(least))
    offer = subject.offer.spec
    needs = subject.needs(usual_cases(subject)[0])
    assert offer.refuse(needs) == []
    asked = {what: {reason.rule for reason in offer.refuse(each)} for what, each in unclaimed(least, needs)}
    assert all(asked.values())
    assert {"device", "dtype", "kv dtype", "page size", "head dim", "MLA", "recurrence", "sliding window", "soft cap"} <= set(asked)
    assert {"phase prefill", "phase mixed", "phase verify", "compute capability", "sparse attention"} <= set(asked)
    assert asked["sliding window"] == {"sliding window"}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_reference_is_the_formula_one_row_at_a_time(window: int | None, sinks: bool) -> None:
    torch.manual_seed(0)
    facts = AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=window, softcap=1.5, sinks=sinks)
    q, k, v = torch.randn(3, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 5)
    logits = torch.randn(4) if sinks else None
    out, lse = reference.attention(q, k, v, facts=facts, scale=0.3, sinks=logits)
    for row, head in itertools.product(range(3), range(4)):
        position = 4 + row
        first = 0 if window is None else max(0, position - window + 1)
        scores = 1.5 * torch.tanh(k[first : position + 1, head // 2].double() @ q[row, head].double() * 0.3 / 1.5)
        total = scores.exp().sum() + (0 if logits is None else logits[head].double().exp())
        torch.testing.assert_close(out[row, head], scores.exp() @ v[first : position + 1, head // 2].double() / total)
        torch.testing.assert_close(lse[row, head], scores.exp().sum().log())


def test_the_reference_of_recurrence_is_its_sum_written_out() -> None:
    torch.manual_seed(0)
    q, k, v, raw = torch.randn(5, 1, 3), torch.randn(5, 1, 3), torch.randn(5, 1, 2), torch.randn(5, 1)
    facts = RecurrentFacts(rule="linear", decay="head", key_heads=1, value_heads=1, key_dim=3, value_dim=2)
    weights = RecurrentWeights(a_log=torch.tensor([-0.7]), dt_bias=torch.tensor([0.2]))
    g = -math.exp(-0.7) * torch.log1p((raw + 0.2).exp())
    mixed = torch.cat((q, k, v), dim=-1)[:, 0]
    out, state = reference.recurrence(mixed, raw, facts=facts, weights=weights, scale=0.5)
    for t in range(5):
        wanted = sum(g[s + 1 : t + 1].double().sum().exp() * (q[t, 0] @ k[s, 0]).double() * v[s, 0].double() for s in range(t + 1))
        torch.testing.assert_close(out[t, 0], 0.5 * wanted, rtol=1e-5, atol=1e-6)
    kept = sum(g[s + 1 :].double().sum().exp() * torch.outer(v[s, 0], k[s, 0]).double() for s in range(5))
    torch.testing.assert_close(state["matrix"], kept[None], rtol=1e-5, atol=1e-6)  # [H, V, D]
