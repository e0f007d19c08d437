"""Choosing: what is asked for by name is used or refused, and every reason is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from enginery.api import (
    AttnBackendSpec,
    AttnLayerFacts,
    AttnNeeds,
    Capabilities,
    CheckpointError,
    ConfigError,
    HookGroup,
    OpNeeds,
    Phase,
    PluginError,
    QueuedFacts,
    Reason,
    Unsupported,
)
from enginery.contracts.ops import OpSpec
from enginery.plugin.boundary import guarded_policy
from enginery.plugin.records import Offer, PluginRecord, Status, absent_plugins
from enginery.plugin.registry import Registry
from enginery.plugin.selection import select, select_ops, weigh, weigh_ops
from enginery.worker.needs import by_phase

CAN = Capabilities(devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), kv_dtypes=frozenset({"float32"}))
LAYER = AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=64)
NEEDS = AttnNeeds(device="cpu", dtype="float32", kv_dtype="float32", page_size=16, layers=(LAYER,))


def offer(name: str, priority: int = 1, **changes) -> Offer[AttnBackendSpec]:
    spec = AttnBackendSpec(name=name, api=(2, 0), priority=priority, capabilities=CAN, summary="", **changes)
    return Offer(spec=spec, group=HookGroup.ATTN_BACKEND, name=name, plugin=f"p-{name}", distribution=f"d-{name}", version="1")


def refuses(text: str):
    return lambda needs: [Reason(rule="mood", text=text)]


def broken(name: str) -> PluginRecord:
    return PluginRecord(name=name, distribution=f"d-{name}", version="2", status=Status.BROKEN, reason="no wheel for this Python")


def test_auto_takes_the_highest_priority_that_refuses_nothing_and_keeps_the_losers_reasons() -> None:
    offers = [offer("low", 1), offer("high", 9, refuse_also=refuses("too early")), offer("middle", 5)]
    selection = select("auto", NEEDS, offers, [])
    assert selection.winner.name == "middle"
    assert [(c.name, c.chosen, [r.text for r in c.reasons]) for c in selection.candidates] == [
        ("high", False, ["too early"]),
        ("middle", True, []),
        ("low", False, []),
    ]


def test_a_backend_can_rank_otherwise_where_it_would_only_prefill() -> None:
    offers = [offer("decoder", 5), offer("prefiller", 3, prefill_priority=7)]
    winners = {role: select("auto", needs, offers, []).winner.name for role, needs in by_phase(NEEDS).items()}
    assert winners == {"prefill": "prefiller", "decode": "decoder", "single": "decoder"}
    assert select("auto", NEEDS, offers, []).winner.name == "decoder"


def test_a_backend_can_rank_otherwise_where_it_would_only_decode_one_request() -> None:
    offers = [offer("decoder", 5), offer("sprinter", 3, single_priority=7, prefill_priority=1)]
    winners = {role: select("auto", needs, offers, []).winner.name for role, needs in by_phase(NEEDS).items()}
    assert winners == {"prefill": "decoder", "decode": "decoder", "single": "sprinter"}
    single = by_phase(NEEDS)["single"]
    assert (single.phases, single.single) == ({Phase.DECODE}, True)
    verifying = by_phase(replace(NEEDS, phases=NEEDS.phases | {Phase.VERIFY}, trees=True))["single"]
    assert (verifying.phases, verifying.trees) == ({Phase.DECODE, Phase.VERIFY}, True)
    (last, first) = sorted(weigh(single, offers), key=lambda candidate: candidate.priority)
    assert [str(last), str(first)] == ["decoder (priority 5): a higher priority was chosen", "sprinter (priority 7): chosen"]


def test_equal_priorities_are_settled_by_name_in_any_order() -> None:
    offers = [offer("b"), offer("a"), offer("c")]
    assert select("auto", NEEDS, offers, []).winner.name == select("auto", NEEDS, offers[::-1], []).winner.name == "a"


def test_a_name_asked_for_is_used_whatever_its_priority() -> None:
    selection = select("low", NEEDS, [offer("low", 1), offer("high", 9)], [])
    assert selection.winner.name == "low"
    assert [candidate.chosen for candidate in selection.candidates] == [False, True]


def test_a_name_asked_for_that_refuses_fails_with_every_reason_and_never_falls_back() -> None:
    needs = replace(NEEDS, dtype="bfloat16", layers=(replace(LAYER, sinks=True),))
    with pytest.raises(Unsupported) as caught:
        select("fa", needs, [offer("fa"), offer("other", 9)], [])
    for text in ("'fa', from plugin p-fa (d-fa==1)", "dtype bfloat16 is not among float32", "attention sinks is needed"):
        assert text in str(caught.value)


def test_an_unknown_name_lists_near_matches_and_the_plugins_that_might_have_had_it() -> None:
    with pytest.raises(PluginError) as caught:
        select("flsh", NEEDS, [offer("flash")], [broken("flsh3")])
    assert "there is no attention backend 'flsh'; did you mean flash?" in str(caught.value)
    assert "plugin flsh3 (d-flsh3==2) might offer it but is broken: no wheel for this Python" in str(caught.value)


def test_plugins_that_are_absent_for_one_reason_are_one_line() -> None:
    rows = [broken("a"), replace(broken("b"), reason="its module has an error"), broken("c")]
    assert absent_plugins(rows) == [
        "plugins a, c might offer it but are broken: no wheel for this Python",
        "plugin b (d-b==2) might offer it but is broken: its module has an error",
    ]


def test_when_all_refuse_every_ones_reasons_are_listed() -> None:
    with pytest.raises(Unsupported) as caught:
        select("auto", NEEDS, [offer("a", refuse_also=refuses("tired")), offer("b", refuse_also=refuses("busy"))], [broken("c")])
    assert "a (priority 1): tired" in str(caught.value)
    assert "b (priority 1): busy" in str(caught.value)
    assert "plugin c (d-c==2)" in str(caught.value)


@pytest.mark.parametrize("answer", [None, False, ["a word"]])
def test_a_rule_that_fails_is_a_reason_that_names_the_plugin_and_is_told(answer, caplog) -> None:
    candidates = weigh(NEEDS, [offer("odd", 9, refuse_also=lambda needs: answer), offer("fine")])
    assert [candidate.chosen for candidate in candidates] == [False, True]
    said = (
        "refuse must return Reason objects, not 'a word'"
        if answer
        else f"refuse_also must return a list of Reason objects, not {answer}"
    )
    assert f"plugin p-odd (d-odd==1) failed while it was asked: TypeError: {said} (" in candidates[0].reasons[0].text
    assert [record.getMessage() for record in caplog.records] == [candidates[0].reasons[0].text]


@pytest.mark.parametrize("raised", [ValueError("odd"), SystemExit(3)])
def test_a_rule_that_raises_is_told_once_though_it_is_asked_often(raised, caplog) -> None:
    def refuse(needs):
        raise raised

    odd = offer("odd", 9, refuse_also=refuse)
    chosen = [[candidate.name for candidate in weigh(NEEDS, [odd, offer("fine")]) if candidate.chosen] for _ in range(3)]
    assert chosen == [["fine"]] * 3
    (record,) = caplog.records
    assert f"plugin p-odd (d-odd==1) failed while it was asked: {type(raised).__name__}: {raised} (" in record.getMessage()


MODELS = """
from pathlib import Path
from enginery.api import CheckpointSpec, ModelSpec, OpSpec, Reason, hookimpl
@hookimpl
def register_models():
    return [ModelSpec(name="llama", api=(2, 0), architectures=("LlamaForCausalLM", "Other"), describe=print, build=print)]
@hookimpl
def register_checkpoints():
    one = CheckpointSpec(name="small", api=(2, 0), priority=1, folder=Path("small"), note="")
    return [one, CheckpointSpec(name="best", api=(2, 0), priority=2, folder=Path("best"), note="")]
@hookimpl
def register_ops():
    def spec(name, priority, device):
        def refuse(needs):
            return [] if needs.device == device else [Reason(rule="device", text="no")]
        return OpSpec(name=name, api=(2, 0), priority=priority, provides=("rms_norm",), refuse=refuse, load=print)
    return [spec("slow", 1, "cpu"), spec("fast", 2, "cpu"), spec("cuda", 3, "cuda")]
"""


def test_a_model_is_found_by_the_first_architecture_that_is_served(site) -> None:
    site.install("m", MODELS)
    offer, why = Registry.load().find_model({"architectures": ["Nope", "Other"]})
    assert (offer.name, why) == ("llama", "serves Other")


FAMILY = """
from enginery.api import ModelSpec, Reason, hookimpl

def refuse(config):
    return [Reason(rule="size", text="serves small ones only")] if config["hidden_size"] > 8 and {picky} else []

@hookimpl
def register_models():
    return [
        ModelSpec(
            name="{name}",
            api=(2, 0),
            architectures=("LlamaForCausalLM",),
            describe=print,
            build=print,
            priority={priority},
            refuse=refuse,
        )
    ]
"""


def test_of_two_families_for_an_architecture_the_higher_priority_is_taken_unless_it_refuses(site) -> None:
    site.install("m", MODELS)
    site.install("own", FAMILY.format(name="own-llama", priority=1, picky=True))
    registry = Registry.load()
    small, why = registry.find_model({"architectures": ["LlamaForCausalLM"], "hidden_size": 8})
    assert small.name == "own-llama"
    assert why == "serves LlamaForCausalLM with priority 1, before or instead of llama (priority 0, plugin m (m==1.0))"
    large, why = registry.find_model({"architectures": ["LlamaForCausalLM"], "hidden_size": 64})
    assert large.name == "llama"
    assert why == "serves LlamaForCausalLM with priority 0, before or instead of own-llama (priority 1, plugin own (own==1.0))"


def test_a_family_that_refuses_alone_says_why(site) -> None:
    site.install("own", FAMILY.format(name="own-llama", priority=1, picky=True))
    with pytest.raises(CheckpointError, match="own-llama refuses LlamaForCausalLM: serves small ones only"):
        Registry.load().find_model({"architectures": ["LlamaForCausalLM"], "hidden_size": 64})


def test_an_unknown_architecture_lists_the_known_ones_near_matches_and_failed_plugins(site) -> None:
    site.install("m", MODELS)
    site.install("bad", "1 / 0")
    with pytest.raises(CheckpointError) as caught:
        Registry.load().find_model({"architectures": ["LamaForCausalLM"]})
    assert "did you mean LlamaForCausalLM?" in str(caught.value)
    assert "Served are: LlamaForCausalLM, Other." in str(caught.value)
    assert "plugin bad (bad==1.0) might offer it but is broken" in str(caught.value)


def test_the_checkpoint_of_highest_priority_is_the_default(site) -> None:
    with pytest.raises(PluginError, match="--model"):
        Registry.load().default_checkpoint()
    site.install("m", MODELS)
    registry = Registry.load()
    assert registry.default_checkpoint().name == "best"
    assert registry.checkpoint("small").spec.priority == 1
    assert registry.checkpoint("nope") is None


def test_operations_that_refuse_nothing_come_by_priority(site) -> None:
    site.install("m", MODELS)
    needs = OpNeeds(device="cpu", dtype="float32")
    assert [found.name for found in select_ops(needs, Registry.load().offers(OpSpec))] == ["fast", "slow"]


def test_an_operation_that_does_not_exist_is_refused(site) -> None:
    site.install("m", MODELS.replace('("rms_norm",)', '("rms_nrm",)'))
    (record,) = (record for record in Registry.load().records if record.name == "m")
    assert "it provides 'rms_nrm', which is no operation; did you mean rms_norm" in record.reason


@pytest.mark.parametrize("wrong", ["'rms_norm'", "(1, 2)", "(['rms_norm'],)"])
def test_what_is_no_tuple_of_names_provides_no_operations(site, wrong: str) -> None:
    site.install("m", MODELS.replace('("rms_norm",)', wrong))
    (record,) = (record for record in Registry.load().records if record.name == "m")
    assert record.reason.endswith(f"provides is {wrong}, but must be a tuple of at least one name")


def test_schedule_policies_are_found_by_name_and_auto_is_first_come_first_served(site) -> None:
    registry = Registry.load()
    assert registry.schedule_policy("auto").name == "fcfs"
    with pytest.raises(PluginError, match=r"no schedule policy 'fcsf'; did you mean fcfs\?"):
        registry.schedule_policy("fcsf")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("lambda request: 1 / 0", "could not give a request its place: ZeroDivisionError"),
        ("lambda request: 'first'", "gave a request the place 'first'; a key is a tuple of numbers"),
        ("lambda request: None", "gave a request the place None; a key is a tuple of numbers"),
        ("lambda request: 3", "gave a request the place 3; a key is a tuple of numbers"),
        ("lambda request: (0, float('nan'))", r"gave a request the place \(0, nan\); a key is a tuple of numbers"),
    ],
)
def test_a_schedule_policy_that_fails_is_named(site, key: str, said: str) -> None:
    code = f"return [SchedulePolicySpec(name='odd', api=(2, 0), key={key}, summary='')]"
    code = f"from enginery.api import SchedulePolicySpec, hookimpl\n@hookimpl\ndef register_schedule_policies():\n    {code}\n"
    site.install("policy-odd", code)
    policy = guarded_policy(Registry.load().schedule_policy("odd"))
    with pytest.raises(PluginError, match=rf"plugin policy-odd \(policy-odd==1.0\) {said}"):
        policy.key(QueuedFacts(request_id="a", priority=0, arrival_s=0.0, num_tokens=1))


OPTIONS = """
from dataclasses import dataclass
from typing import Literal, Optional
@dataclass(frozen=True)
class Options:
    workspace_mb: int = 128
    ratio: float = 0.5
    fast: bool = False
    kind: Literal["fa2", "fa3"] = "fa2"
    limit: Optional[int] = None
    label: str | None = "x"
    def __post_init__(self):
        if self.workspace_mb > 1000:
            raise ValueError("workspace_mb is above 1000")
"""


def with_options(site, **changes: str) -> None:
    code = site.backend("fa").replace("capabilities=can", "capabilities=can, options=Options")
    for old, new in changes.items():
        code = code.replace(old, new)
    site.install("p", OPTIONS + code)
    site.install("plain", site.backend("plain"))


def test_options_reach_the_plugins_dataclass_with_their_types(site) -> None:
    with_options(site)
    texts = ["fa.workspace_mb=256", "fa.ratio=0.25", "fa.fast=true", "fa.kind=fa3", "fa.limit=7", "fa.label=None"]
    options = Registry.load(options=texts).options_for("fa")
    shown = "Options(workspace_mb=256, ratio=0.25, fast=True, kind='fa3', limit=7, label=None)"
    assert repr(options) == shown


def test_options_that_nobody_sets_keep_their_defaults(site) -> None:
    with_options(site)
    registry = Registry.load()
    assert registry.options_for("fa").workspace_mb == 128
    assert registry.options_for("plain") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fa.workspace_mb", "write -o NAME.key=value"),
        ("workspace_mb=1", "write -o NAME.key=value"),
        ("faa.workspace_mb=1", "nothing named 'faa' takes options; did you mean fa?"),
        ("plain.x=1", "nothing named 'plain' takes options"),
        ("fa.workspace=1", "fa has no such option; did you mean workspace_mb?"),
        ("fa.workspace_mb=1.5", "fa.workspace_mb=1.5: the value must be a whole number"),
        ("fa.workspace_mb=none", "must be a whole number"),
        ("fa.fast=maybe", "must be true or false"),
        ("fa.kind=fa4", "must be fa2 or fa3"),
        ("fa.limit=x", "must be a whole number or none"),
        ("fa.workspace_mb=2000", "the options of fa do not go together: workspace_mb is above 1000"),
    ],
)
def test_options_that_are_not_understood_are_errors(site, text: str, message: str) -> None:
    with_options(site)
    with pytest.raises(ConfigError) as caught:
        Registry.load(options=[text])
    assert message in str(caught.value)


def test_an_option_given_twice_is_an_error(site) -> None:
    with_options(site)
    with pytest.raises(ConfigError, match="given twice"):
        Registry.load(options=["fa.limit=1", "fa.limit=2"])


def test_an_option_of_a_blocked_plugin_says_so(site) -> None:
    with_options(site)
    with pytest.raises(ConfigError, match=r"plugin p \(p==1.0\) might offer it but is blocked"):
        Registry.load(options=["fa.limit=1"], blocked=["p"])


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("limit: int", "has no default"),
        ("limit: list = None", "option 'limit' is"),
        ("limit: Nowhere = None", "NameError: name 'Nowhere' is not defined"),
        ("workspace_mb: int = 2000", "ValueError: workspace_mb is above 1000"),
    ],
)
def test_options_that_text_cannot_set_make_the_plugin_broken(site, field: str, message: str) -> None:
    code = OPTIONS.replace("workspace_mb: int = 128", field).replace("limit: Optional[int] = None\n", "\n")
    code = "from __future__ import annotations\n" + code
    site.install("p", code + site.backend("fa").replace("capabilities=can", "capabilities=can, options=Options"))
    (record,) = (record for record in Registry.load().records if record.name == "p")
    assert record.status is Status.BROKEN
    assert message in record.reason


def test_the_winner_of_each_operation_and_what_was_refused_are_said_for_a_model(site) -> None:
    code = """
    from enginery.api import OpSpec, Reason, hookimpl

    @hookimpl
    def register_ops():
        def refuse(needs):
            return [] if needs.device == "cpu" else [Reason(rule="device", text="for CPUs")]
        return [OpSpec(name="mine", api=(2, 0), priority=5, provides=("greedy",), refuse=refuse, load=dict)]
    """
    site.install("mine", code)
    registry = Registry.load()
    assert weigh_ops(OpNeeds(device="cpu", dtype="float32"), registry.offers(OpSpec)) == ["mine (priority 5): gives greedy"]
    assert weigh_ops(OpNeeds(device="cuda", dtype="float32"), registry.offers(OpSpec)) == ["mine (priority 5): for CPUs"]
