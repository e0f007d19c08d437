"""Each sampling parameter does what it says, and no row depends on another."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from enginery.contracts.request import SamplingParams
from enginery.engine.sampling_input import SamplingRow, sampling_input
from enginery.errors import RequestError
from enginery.nn.reference_ops import reference_ops
from enginery.schedule.adjustments import Adjustments
from enginery.testing.readback import no_reads
from enginery.worker import sampling
from enginery.worker.sampling import token_logprobs, uniform, uniform_on_device

VOCAB = 12


def sample(table: torch.Tensor, rows: Sequence[SamplingRow], eos: frozenset[int]) -> torch.Tensor:
    values, refused = sampling_input(rows, eos, vocab_size=table.shape[-1])
    assert not refused
    return sampling.sample(table, values, ops=reference_ops())


def row(prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = (), **params: object) -> SamplingRow:
    adjustments = Adjustments(SamplingParams(**{"seed": 0, **params}), array("i", (*prompt, *output)), len(prompt))
    return SamplingRow(adjustments, position=len(prompt) + len(output))


def logits(**peaks: float) -> torch.Tensor:
    values = torch.zeros(VOCAB)
    for token, value in peaks.items():
        values[int(token[1:])] = value
    return values


def pick(values: torch.Tensor, asked: SamplingRow, eos: frozenset[int] = frozenset()) -> int:
    return int(sample(values[None], [asked], eos)[0])


def draw(values: torch.Tensor, count: int = 2000, **params: object) -> Counter[int]:
    rows = [row(seed=seed, **params) for seed in range(count)]
    return Counter(sample(values.expand(count, -1), rows, frozenset()).tolist())


def test_uniform_numbers_are_uniform_and_depend_on_seed_and_position() -> None:
    numbers = uniform(np.arange(100, dtype=np.uint64).repeat(100), np.array([*range(100)] * 100, np.uint64)).tolist()
    assert len(set(numbers)) == len(numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.01
    counts = Counter(int(number * 10) for number in numbers)
    assert min(counts.values()) > 850
    assert all(0 <= number < 1 for number in numbers)


def test_the_device_draws_the_same_uniform_numbers() -> None:
    chance = np.random.default_rng(1)
    seeds = np.concatenate([chance.integers(0, 2**64, 500, np.uint64), np.array([0, 2**63, 2**64 - 1], np.uint64)])
    for position in (0, 1, 70, 2**40):
        expected = uniform(seeds, np.full(len(seeds), position, np.uint64))
        found = uniform_on_device(torch.from_numpy(seeds.view(np.int64)), torch.tensor(position))
        assert found.tolist() == expected.tolist()


def test_temperature_zero_takes_the_best() -> None:
    assert pick(logits(t3=1.0, t5=2.0), row(temperature=0)) == 5


def test_sampled_shares_follow_the_softmax() -> None:
    values = logits(t1=math.log(60.0), t2=math.log(30.0))
    counts = draw(values, 4000, temperature=1.0)
    assert counts[1] / 4000 == pytest.approx(0.6, abs=0.03)
    assert counts[2] / 4000 == pytest.approx(0.3, abs=0.03)
    sharper = draw(values, 4000, temperature=0.5)
    assert sharper[1] / 4000 == pytest.approx(3600 / 4510, abs=0.03)


def test_top_k_keeps_the_best() -> None:
    assert set(draw(logits(t1=1.0, t2=0.9, t3=0.8), top_k=2)) == {1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    values = torch.full((VOCAB,), -50.0)
    values[:3] = torch.tensor([0.5, 0.3, 0.2]).log()
    assert set(draw(values, top_p=0.5)) == {0}
    assert set(draw(values, top_p=0.51)) == {0, 1}
    assert set(draw(values, top_p=0.81)) == {0, 1, 2}


def test_min_p_is_relative_to_the_best() -> None:
    values = torch.full((VOCAB,), -50.0)
    values[:3] = torch.tensor([0.6, 0.31, 0.09]).log()
    assert set(draw(values, min_p=0.5)) == {0, 1}


def test_penalties_follow_their_definitions() -> None:
    values = logits(t3=2.0, t4=1.5)
    assert pick(values, row(output=(3,), temperature=0, presence_penalty=0.4)) == 3
    assert pick(values, row(output=(3,), temperature=0, presence_penalty=0.6)) == 4
    assert pick(values, row(output=(3, 3), temperature=0, frequency_penalty=0.2)) == 3
    assert pick(values, row(output=(3, 3), temperature=0, frequency_penalty=0.3)) == 4
    assert pick(values, row(prompt=(3,), temperature=0, presence_penalty=2)) == 3  # the prompt is not counted
    assert pick(values, row(prompt=(3,), temperature=0, repetition_penalty=1.5)) == 4  # here it is
    assert pick(-values.flip(0) - 1, row(prompt=tuple(range(7)), temperature=0, repetition_penalty=2.0)) == 9


def test_of_many_rows_each_is_penalised_for_its_own_tokens() -> None:
    torch.manual_seed(0)
    table, expected, rows = torch.randn(45, 70), [], list[SamplingRow]()
    for index in range(len(table)):
        output, drafts = (index, 69, index), (7, index + 1, 5)[: index % 4]
        one = row(prompt=(7, 31), output=output, temperature=0, repetition_penalty=(1.0, 1.7, 0.6)[index % 3])
        rows.append(one._replace(drafts=drafts, position=5 + len(drafts)))
        penalty = one.params.repetition_penalty
        values = [float(value) for value in table[index]]
        for token in {7, 31, *output, *drafts}:
            values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
        expected.append(max(range(70), key=values.__getitem__))
    assert sample(table, rows, frozenset()).tolist() == expected


def test_logit_bias_adds() -> None:
    assert pick(logits(t3=2.0), row(temperature=0, logit_bias={7: 2.5})) == 7
    assert 3 not in draw(logits(t3=2.0), logit_bias={3: -100})


def test_min_tokens_forbids_every_way_to_end() -> None:
    values = logits(t3=5.0, t4=4.0, t6=1.0)
    asked = dict(temperature=0, min_tokens=2, stop_token_ids=(4,))
    assert pick(values, row(**asked), frozenset({3})) == 6
    assert pick(values, row(output=(0, 0), **asked), frozenset({3})) == 3
    assert pick(values, row(ignore_eos=True, **asked), frozenset({3})) == 3


def test_a_row_gets_the_same_token_in_any_company() -> None:
    torch.manual_seed(0)
    table = torch.randn(6, VOCAB)
    asked = [
        row(seed=11, temperature=0.7),
        row(temperature=0),
        row(seed=5, top_k=3),
        row(seed=6, top_p=0.7, output=(2, 2), frequency_penalty=1.0),
        row(seed=7, min_p=0.2),
        row(seed=8, logit_bias={3: 5}),
    ]
    together = sample(table, asked, frozenset()).tolist()
    alone = [pick(table[index], each) for index, each in enumerate(asked)]
    assert together == alone
    backwards = sample(table.flip(0), asked[::-1], frozenset()).tolist()
    assert backwards == alone[::-1]


def test_sampling_leaves_the_logits_as_they_were() -> None:
    values = logits(t3=2.0)[None]
    before = values.clone()
    sample(values, [row(logit_bias={3: -100}, repetition_penalty=2.0, min_tokens=3)], frozenset({1}))
    assert torch.equal(values, before)


def test_logprobs_are_those_of_the_plain_softmax() -> None:
    torch.manual_seed(0)
    table = torch.randn(2, VOCAB)
    expected = table.double().log_softmax(-1)
    first, second = token_logprobs(table, torch.tensor([4, 7]), [0, 3]).rows()
    assert first.top == ()
    assert first.logprob == pytest.approx(float(expected[0, 4]), abs=1e-5)
    assert [token for token, _ in second.top] == expected[1].topk(3).indices.tolist()
    assert second.top[0][1] == pytest.approx(float(expected[1].max()), abs=1e-5)


def test_nothing_is_read_from_the_device_while_a_step_is_launched() -> None:
    table = torch.randn(3, VOCAB)
    rows = [
        row(temperature=0, prompt=(3, 3, 4), output=(5, 5), repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5),
        row(seed=6, top_p=0.7, logit_bias={3: -100}),
        row(seed=7, min_tokens=3, top_k=4),
    ]
    with no_reads(torch.device("cpu")):
        found = token_logprobs(table, sample(table, rows, frozenset({1})), [2, 0, 1])
    assert [len(each.top) for each in found.rows()] == [2, 0, 1]


def test_a_number_that_rounds_to_one_never_takes_an_excluded_token() -> None:
    seed = 48117297
    assert torch.tensor(uniform(np.array([seed], np.uint64), np.array([5], np.uint64)), dtype=torch.float32) == 1
    values = logits(t3=9.0)
    values[7:] = -1e4
    asked = dict(prompt=(1, 2, 3, 4, 5), seed=seed)
    for cut in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 0.9}, {"logit_bias": {11: -100}}):
        token = pick(values, row(**asked, **cut))
        assert token == 3 or ("logit_bias" in cut and token < 7)
    wide = sample(values.expand(2, -1), [row(**asked, top_k=1), row(top_k=9)], frozenset())
    assert wide[0] == 3


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40, 5e-324])
def test_the_tiniest_temperatures_are_greedy(temperature: float) -> None:
    assert pick(logits(t3=1.0, t5=1.001), row(temperature=temperature)) == 5


def test_one_stop_string_lists_and_numpy_numbers_are_taken() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[1, 2], max_tokens=np.int64(3), logit_bias={np.int32(4): 1})
    assert (params.stop, params.stop_token_ids, params.max_tokens, params.logit_bias) == (("END",), (1, 2), 3, {4: 1.0})
    assert type(params.max_tokens) is int


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": math.nan},
        {"temperature": -1},
        {"temperature": 10**400},
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"top_k": -5},
        {"top_k": 10**400},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"n": 0},
        {"n": 5_000_000},
        {"logprobs": 1_000_000},
        {"max_tokens": 0},
        {"min_tokens": 9, "max_tokens": 8},
        {"stop": ("",)},
        {"stop": ("x",) * 17},
        {"logit_bias": {3: math.inf}},
        {"logit_bias": {3: 10**5000}},
        {"presence_penalty": 3},
        {"max_tokens": 2.5},
        {"max_tokens": None},
        {"max_tokens": "5"},
        {"seed": 1.5},
        {"logprobs": True},
        {"temperature": "hot"},
        {"stop": (3,)},
        {"logit_bias": {"5": 1.0}},
    ],
)
def test_a_senseless_parameter_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**wrong)
    assert error.value.param == next(iter(wrong))
