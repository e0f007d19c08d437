"""What a plugin's operations must be before a model runs with them; each fault is told with the plugin's name and version."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from offers import op_offer, op_spec

from enginery.contracts.ops import OpNeeds, OpSpec, OpTable, Routing
from enginery.errors import PluginError
from enginery.nn import reference_ops
from enginery.nn.op_cases import OP_CASES, results_of
from enginery.plugin.records import Offer
from enginery.plugin.selection import op_winners, weigh_ops
from enginery.worker import op_table
from enginery.worker.op_table import blaming, load_table

CPU = torch.device("cpu")
NEEDS = OpNeeds(device="cpu", dtype="bfloat16")


def offer(loads: object, *, provides: tuple[str, ...] | None = None, name: str = "mine", priority: int = 1) -> Offer[OpSpec]:
    spec = op_spec(loads, provides=provides, name=name, priority=priority)
    return op_offer(spec, plugin="fast", distribution="fast-ops", version="3.1")


def refused(*offers: Offer[OpSpec]) -> str:
    with pytest.raises(PluginError) as caught:
        load_table(offers, NEEDS, CPU)
    assert "plugin fast (fast-ops==3.1)" in str(caught.value)
    return str(caught.value)


def test_a_sound_plugin_overrides_what_it_provides_and_nothing_else() -> None:
    def gated_silu(x):
        return reference_ops.gated_silu(x)

    table = load_table((offer({"gated_silu": gated_silu}),), NEEDS, CPU)
    assert table.gated_silu is gated_silu
    assert table.rms_norm is reference_ops.rms_norm


@pytest.mark.parametrize("narrow", [False, True])
def test_a_router_is_given_float32_unless_it_takes_what_models_compute_in(narrow: bool) -> None:
    given = []

    def route(logits, bias, routing):
        given.append(logits.dtype)
        return reference_ops.route(logits, bias, routing)

    offered = offer({"route": route})
    offered = dataclasses.replace(offered, spec=dataclasses.replace(offered.spec, narrow_logits=narrow))
    table = load_table((offered,), NEEDS, CPU)
    routed = table.route(torch.randn(3, 8).bfloat16(), None, Routing(top_k=2))
    assert given[-1] is (torch.bfloat16 if narrow else torch.float32)
    assert routed.weights.dtype is torch.float32


def test_what_is_loaded_must_be_what_is_declared() -> None:
    loads = {"rms_norm": reference_ops.rms_norm, "gated_silu": lambda x: x}
    said = refused(offer(loads, provides=("rms_norm", "greedy")))
    assert "gated_silu is loaded and not declared" in said
    assert "greedy is declared and not loaded" in said


@pytest.mark.parametrize("loads", [None, [("rms_norm", reference_ops.rms_norm)], "rms_norm"])
def test_load_must_return_a_mapping(loads) -> None:
    assert "must return a mapping" in refused(offer(loads, provides=("rms_norm",)))


def test_what_cannot_be_called_is_refused_at_the_start() -> None:
    assert "gated_silu is 'fast', which cannot be called" in refused(offer({"gated_silu": "fast"}))


def test_other_arguments_than_the_operations_are_refused() -> None:
    def rms_norm(x, weight): ...

    def qk_norm_rotary_write(qkv, weight, eps, cos_sin, keys, values): ...

    said = refused(offer({"rms_norm": rms_norm, "qk_norm_rotary_write": qk_norm_rotary_write}))
    assert "rms_norm takes (x, weight), and is called with (x, weight, eps)" in said
    assert "and is called with (qkv, weight, eps, cos_sin, keys=, values=, slots=)" in said


def test_a_function_in_c_that_says_nothing_of_its_arguments_is_taken() -> None:
    assert op_table.argument_problem("greedy", dict.fromkeys, reference_ops.greedy) == ""


@pytest.mark.parametrize(
    ("name", "function", "fault"),
    [
        ("gated_silu", lambda x: reference_ops.gated_silu(x).float(), "has dtype torch.float32, and must have torch.bfloat16"),
        ("gated_silu", lambda x: x, "has shape (2, 64), and must have (2, 32)"),
        ("greedy", lambda logits: logits.argmax(-1).int(), "has dtype torch.int32, and must have torch.int64"),
        ("rms_norm", lambda x, weight, eps: None, "is None, which is no tensor"),
        ("bind_linear", lambda weight, bias: lambda x: (x @ weight.T).double(), "has dtype torch.float64"),
        ("gated_silu", lambda x: x.no_such_method(), "could not run its operation gated_silu (rows 2, size 32, bfloat16)"),
    ],
)
def test_a_wrong_result_is_told_at_the_start_with_operation_plugin_and_version(name: str, function, fault: str) -> None:
    said = refused(offer({name: function}))
    assert name in said
    assert fault in said


def test_only_what_wins_is_tried() -> None:
    good = offer({"greedy": reference_ops.greedy}, name="good", priority=9)
    hidden = offer({"greedy": lambda logits: None}, name="hidden", priority=1)
    assert load_table((good, hidden), NEEDS, CPU).greedy is reference_ops.greedy


def test_on_a_device_where_trying_costs_compiling_a_failure_is_blamed_afterwards() -> None:
    wrong = offer({"gated_silu": lambda x: reference_ops.gated_silu(x).float()})
    table = dataclasses.replace(reference_ops.reference_ops(), **wrong.spec.load(NEEDS))

    def first_step() -> None:
        with blaming(table, (wrong,), NEEDS, CPU):
            raise RuntimeError("mat1 and mat2 must have the same dtype")

    with pytest.raises(
        PluginError, match=r"gated_silu, from plugin fast \(fast-ops==3.1\): .*float32.*the first step failed"
    ) as caught:
        first_step()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_failure_that_is_no_operations_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="of a model"), blaming(reference_ops.reference_ops(), (), NEEDS, CPU):
        raise RuntimeError("of a model")


def test_every_operation_has_cases() -> None:
    assert set(OP_CASES) == {field.name for field in dataclasses.fields(OpTable)}


@pytest.mark.parametrize("name", OP_CASES)
def test_a_case_gives_the_same_inputs_again(name: str) -> None:
    op = vars(reference_ops.reference_ops())[name]
    for case in OP_CASES[name]:
        one, two = (results_of(op, case, dtype=torch.float32, device=CPU) for _ in range(2))
        assert all(torch.equal(one[part], two[part]) for part in one)


def test_each_operation_comes_from_the_highest_priority_that_has_it_and_the_reason_is_said() -> None:
    few = offer({"greedy": None}, name="few", priority=9)
    many = offer({"greedy": None, "rms_norm": None}, name="many", priority=5)
    none = offer({"greedy": None}, name="none", priority=1)
    assert {name: each.name for name, each in op_winners((few, many, none)).items()} == {"greedy": "few", "rms_norm": "many"}
    assert weigh_ops(NEEDS, (none, many, few)) == [
        "few (priority 9): gives greedy",
        "many (priority 5): gives rms_norm",
        "none (priority 1): a higher priority gives all that it provides",
    ]


@pytest.mark.parametrize("names", list(itertools.permutations("abc")))
def test_the_order_of_installation_decides_nothing(names: tuple[str, ...]) -> None:
    offers = [offer({"greedy": None}, name=name, priority=3) for name in names]
    assert weigh_ops(NEEDS, offers)[0] == "a (priority 3): gives greedy"
