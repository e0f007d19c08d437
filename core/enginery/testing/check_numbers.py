"""Rules about results: equal to the formula, and the same whichever way the same thing is asked for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from enginery.attention.composite import CompositePlan
from enginery.attention.latent import RaggedPart
from enginery.attention.prefill_strategy import cut_pieces
from enginery.contracts.batch import STATE, ForwardBatch, Phase
from enginery.contracts.latent import ChunkPlan, Denied, KVPiece, PrefillStrategy
from enginery.contracts.plan import Accepted
from enginery.errors import StalePlan
from enginery.testing import reference
from enginery.testing.cases import AttnCase
from enginery.testing.readback import no_reads
from enginery.testing.rules import BrokenRule, SkippedCheck, compare, compare_lse, raising, rule
from enginery.testing.stage import Turn, pointing
from enginery.testing.subject import Subject, covering_cases, leaf_cases, mla_cases, usual_cases, wrapped_cases
from enginery.testing.workbench import CHUNK_TOKENS, Workbench

_VERIFIED: Final = 4  # rows of a request that verifies drafts
_CUT_PROMPTS: Final = ((0, 17), (19, 24), (0, 80), (16, 9), (5, 3))  # cached tokens and new ones, whose states are kept
_KEPT_AFTER: Final = (16, 13, 64, 0, 1)  # so many rows; 0: nowhere
_PAGES: Final = "Look at how many tokens the last page holds, at the page numbers, and at the mask of each row."
_DECODING: Final = [(index % 5, 1) for index in range(70)]
_PROMPTS: Final = [(index % 4, 1 + index % 3) for index in range(20)]
_MANY: Final = {Phase.DECODE: _DECODING, Phase.PREFILL: _PROMPTS, Phase.MIXED: _DECODING[:25] + _PROMPTS}
_SIZES: Final = "Take lengths from q_lens_cpu and kv_lens_cpu of each request, never from the tensors' sizes."


def equals_formula(bench: Workbench, turns: list[Turn], phase: Phase, what: str = "") -> None:
    expected = [bench.expected(turn) for turn in turns]
    compare(bench.run(turns, phase), expected, dtype=bench.case.dtype, leeway=bench.case.leeway, what=f"{phase}{what}")


@rule(covering_cases, f"{_PAGES} Claim only what works.")
def numbers(subject: Subject, case: AttnCase) -> None:
    """Results equal the formula in float64 for everything that capabilities claim."""
    bench = Workbench(subject, case)
    for phase, turns in bench.steps():
        equals_formula(bench, turns, phase)


@rule(leaf_cases, "Subtract a row's largest score before exp, of all blocks of its keys.")
def large_scores(subject: Subject, case: AttnCase) -> None:
    """Scores may be above 100 or below -100, where exp in float32 is infinite or 0."""
    if case.facts.recurrent is not None:
        raise SkippedCheck("recurrent layers have no scores")
    bench = Workbench(subject, dataclasses.replace(case, facts=dataclasses.replace(case.facts, softcap=None)))
    for score in (150.0,) if case.facts.sinks else (150.0, -150.0):  # beside a sink nothing is left of rows far below it
        for phase, turns in bench.steps():
            turns = [turn._replace(tokens=pointing(turn.tokens, score / bench.layer.scale)) for turn in turns]
            expected, what = [bench.expected(turn) for turn in turns], f"{phase} with scores of {score:.0f}"
            leeway = 8.0 if case.dtype == "float32" else 1.0  # which has 150 to within 2e-5
            compare(bench.run(turns, phase), expected, dtype=case.dtype, leeway=leeway, what=what)


@rule(usual_cases, _SIZES)
def ragged_lengths(subject: Subject, case: AttnCase) -> None:
    """Requests of any lengths share a batch, one token is a length, and a batch is of one request or of seventy."""
    bench = Workbench(subject, case, num_requests=120)
    lengths = {
        Phase.PREFILL: [(0, 1), (0, 40), (7, 1), (1, 17), (30, 2), (0, 3)],
        Phase.DECODE: [(cached, 1) for cached in (60, 0, 1, 2, 31, 16)],
    }
    for phase in sorted(lengths.keys() & subject.can.phases):
        for each in (lengths[phase], lengths[phase][:1], lengths[phase][1:2]):
            equals_formula(bench, bench.turns(each), phase, f" of {each}")
    for phase in sorted(_MANY.keys() & subject.can.phases):
        bench.forget()
        equals_formula(bench, bench.turns(_MANY[phase]), phase, f" of {len(_MANY[phase])} requests")


@rule(usual_cases, _SIZES)
def long_tail(subject: Subject, case: AttnCase) -> None:
    """One request of thousands of tokens may be beside short ones, or alone."""
    bench = Workbench(subject, case, num_tokens=6000)
    for phase, new in ((Phase.DECODE, 1), (Phase.PREFILL, 7)):
        if phase in subject.can.phases:
            turns = bench.turns([(3, new), (2500, new), (0, new), (20, new)])
            for each in (turns, turns[1:2])[: 1 + (case.facts.recurrent is None)]:  # a state moves on with every run
                equals_formula(bench, each, phase, f" of {len(each)}")


@rule(usual_cases, "Plan nothing where there are no requests, and return from attend.")
def empty_batch(subject: Subject, case: AttnCase) -> None:
    """A batch without requests is planned and attended."""
    bench = Workbench(subject, case)
    for phase in (Phase.IDLE, *sorted(subject.can.phases)):
        bench.run([], phase)


@rule(usual_cases, "Padding is on the scratch page and in the scratch state; requests may have no tokens.")
def padding_only(subject: Subject, case: AttnCase) -> None:
    """A batch of padding alone is planned and attended, and changes no memory that is not for padding."""
    bench = Workbench(subject, case)
    for phase in sorted(subject.can.phases):
        for requests, tokens in ((4, 4), (2, 9)):
            padded = bench.pad(bench.batch([], phase), requests=requests, tokens=tokens)
            before = bench.memory()
            bench.plan_and_attend(padded, [])
            if not all(torch.equal(old, new) for old, new in zip(before, bench.memory(), strict=True)):
                raise BrokenRule(f"{phase}: {tokens} tokens of padding change memory that is not for padding")


@rule(usual_cases, _SIZES)
def padded_equals_unpadded(subject: Subject, case: AttnCase) -> None:
    """Padding changes no real request's results, be it requests of one token or tokens of no request."""
    plain = Workbench(subject, case)
    benches = {padding: Workbench(subject, case) for padding in ((3, 3), (2, 7), (0, 5))}
    for (phase, turns), *others in zip(plain.steps(), *(bench.steps() for bench in benches.values()), strict=True):
        expected = plain.run(turns, phase)
        for ((requests, tokens), bench), (_, same) in zip(benches.items(), others, strict=True):
            batch = bench.pad(bench.batch(same, phase), requests=requests, tokens=tokens)
            what = f"{phase} with {requests} requests and {tokens} tokens of padding"
            compare(bench.plan_and_attend(batch, same), expected, dtype=case.dtype, leeway=case.leeway, what=what)


@rule(wrapped_cases, "A row's position is kv_len - q_len + its place; what is cached is seen by every row.")
def chunked_equals_whole(subject: Subject, case: AttnCase) -> None:
    """A prompt computed in several steps, beside others, gives what it gives in one."""
    _only_in(subject, Phase.PREFILL)
    bench = Workbench(subject, case)
    (whole,) = bench.turns([(0, 61)])
    again, parts = bench.twin(whole.tokens), []
    for first, last in ((0, 16), (16, 45), (45, 61)):
        out = bench.run([*bench.turns([(5, 4)]), Turn(again, first, last - first)], Phase.PREFILL)
        parts.append(out[1])
    at_once = bench.run([whole], Phase.PREFILL)
    what = "a prompt of 61 tokens in chunks of 16, 29 and 16"
    compare([torch.cat(parts)], at_once, dtype=case.dtype, leeway=case.leeway, what=what)


@rule(wrapped_cases, "Read keys by the page table only; pages may be shared.")
def prefix_hit(subject: Subject, case: AttnCase) -> None:
    """Tokens after a prefix on another request's pages give what they give on their own."""
    _only_in(subject, Phase.PREFILL)
    if case.facts.recurrent is not None:
        raise SkippedCheck("recurrent layers have no pages to share")
    bench, shared = Workbench(subject, case), -(-40 // case.page_size)
    cached = shared * case.page_size
    (owner,) = bench.turns([(0, cached + 5)])
    hit = bench.sharing(owner.tokens, shared, cached + 9)
    (recomputed,) = bench.run([Turn(bench.twin(hit), 0, cached + 9)], Phase.PREFILL)
    bench.run([owner], Phase.PREFILL)
    out = bench.run([*bench.turns([(0, 3)]), Turn(hit, cached, 9)], Phase.PREFILL)
    compare(out[1:], [recomputed[cached:]], dtype=case.dtype, what=f"9 tokens after a prefix of {cached} on another's pages")


@rule(leaf_cases, "Keep what advance is given, and have commit_state move states by the rows that stand, convolutions too.")
def states_after_verification(subject: Subject, case: AttnCase) -> None:
    """States stay as they are while drafts are verified; commit_state moves them by the rows that stand, once."""
    if case.facts.recurrent is None:
        raise SkippedCheck("layers with keys and values have no states")
    for shift, phase in enumerate((Phase.VERIFY, Phase.MIXED)):
        _only_in(subject, phase)
        bench = Workbench(subject, case)
        verified = _verified(bench, phase, shift)
        _verify(bench, verified, phase)
        _go_on(bench, verified)


class _Verified(NamedTuple):
    """Requests that verify drafts, how many of each are right, checkpoints: pages, and after how many rows; chunks beside them."""

    turns: list[Turn]
    right: list[int]
    pages: list[int]
    rows: list[int]
    chunks: list[Turn]

    @property
    def all_turns(self) -> list[Turn]:
        return [*self.turns, *self.chunks]

    @property
    def standing(self) -> list[int]:
        """How many rows of each request stand."""
        return [*(1 + count for count in self.right), *(turn.new for turn in self.chunks)]


def _verified(bench: Workbench, phase: Phase, shift: int) -> _Verified:
    """Each has another number of right drafts, and all but the first have a checkpoint. A mixed batch has chunks of prompts."""
    whole = bench.turns([(cached, _VERIFIED + 6) for cached in (19, 0, 5, 33)])
    return _Verified(
        turns=[turn._replace(new=_VERIFIED) for turn in whole],
        right=[(place + shift) % _VERIFIED for place in range(len(whole))],
        pages=[bench.tokens(1).states[0] for _ in whole],
        rows=[1 + (place + 2 * shift) % _VERIFIED if place else 0 for place in range(len(whole))],
        chunks=bench.turns([(0, _VERIFIED), (7, 9)]) if phase is Phase.MIXED else [],
    )


def _verify(bench: Workbench, verified: _Verified, phase: Phase) -> None:
    """Advance and commit, and see that no state moves before, and none of another request's at all."""
    batch = _with_checkpoints(bench.batch(verified.all_turns, phase), verified)
    if not verified.chunks:
        batch = bench.pad(batch, requests=2, tokens=2 * _VERIFIED)
    batch, before = bench.relay.plan(batch), bench.memory()
    _advance_drafts(bench, batch, verified)
    _check_unmoved(bench, before, verified.chunks, (), "states move while drafts are verified")
    counts = torch.tensor([*verified.standing, *[2] * (batch.num_requests - len(verified.all_turns))], device=bench.device) - 1
    commit = functools.partial(bench.leaf.ask, "commit_state", plan=batch.plan, accepted=Accepted(counts=counts))
    with no_reads(bench.device):
        done = commit()
    if done is None:
        raise BrokenRule("it claims to verify drafts, and commit_state does nothing")
    if did := raising(commit, StalePlan):
        raise BrokenRule(f"a second commit_state {did}")
    _check_unmoved(bench, before, verified.all_turns, verified.pages, "commit_state changes a state that is another's")


def _go_on(bench: Workbench, verified: _Verified) -> None:
    """From checkpoints, then from where the right drafts end: several tokens, and one more."""
    whole = zip(verified.turns, verified.pages, verified.rows, verified.right, strict=True)
    resumed = [
        Turn(dataclasses.replace(turn.tokens, states=[page]), turn.cached + rows, 2)
        for turn, page, rows, right in whole
        if 0 < rows <= 1 + right
    ]
    equals_formula(bench, resumed, Phase.PREFILL, " from checkpoints")
    what = f" after {verified.right} right drafts of {_VERIFIED - 1}"
    standing = zip(verified.turns, verified.right, strict=True)
    going_on = [turn._replace(cached=turn.cached + 1 + right, new=4) for turn, right in standing]
    equals_formula(bench, going_on, Phase.PREFILL, what)
    equals_formula(bench, [turn._replace(cached=turn.cached + 4, new=1) for turn in going_on], Phase.DECODE, what)


def _with_checkpoints(batch: ForwardBatch, verified: _Verified) -> ForwardBatch:
    """The batch with checkpoints of its first requests, and the rows that these verify."""
    none = [0] * len(verified.chunks)
    view = dataclasses.replace(
        batch.states,
        checkpoints_cpu=torch.tensor([*verified.pages, *none], dtype=torch.int32),
        checkpoint_rows_cpu=torch.tensor([*verified.rows, *none], dtype=torch.int32),
    )
    return dataclasses.replace(batch, decode_len=_VERIFIED, views={**batch.views, STATE: view})


def _advance_drafts(bench: Workbench, batch: ForwardBatch, verified: _Verified) -> None:
    """Drafts that are wrong are noise; what comes before them equals the formula."""
    turns, standing = verified.all_turns, verified.standing
    inputs = bench.inputs(turns, batch.num_tokens)
    for place, count in enumerate(verified.right):
        wrong = slice(place * _VERIFIED + 1 + count, (place + 1) * _VERIFIED)
        for part in inputs:
            part[wrong] = bench.randn(*part[wrong].shape).abs().to(part.dtype)
    out = bench.guarded_out(batch.num_tokens)
    bench.call(inputs, batch, batch.plan, out[1:-1])
    found = [rows[:count] for rows, count in zip(bench.rows_of(out, turns), standing, strict=True)]
    wanted = [bench.expected(turn)[:count] for turn, count in zip(turns, standing, strict=True)]
    compare(found, wanted, dtype=bench.case.dtype, leeway=bench.case.leeway, what=f"{batch.phase} of {_VERIFIED} rows")


def _check_unmoved(bench: Workbench, before: list[torch.Tensor], turns: Sequence[Turn], pages: Sequence[int], what: str) -> None:
    """Of all pages but these, and those that are written of these requests."""
    besides = [*pages, *(turn.tokens.states[-1] for turn in turns)]
    for old, new in zip(before, bench.memory(), strict=True):
        same = (old == new).flatten(1).all(1)
        same[besides] = True
        if not bool(same.all()):
            raise BrokenRule(what)


@rule(
    leaf_cases, "In advance, run a prompt's rows up to its checkpoint into that page, the others on from there; or do not claim it."
)
def states_amid_prompts(subject: Subject, case: AttnCase) -> None:
    """States of prompts after some of their rows are in the pages of checkpoints when advance has run; nothing else changes."""
    if case.facts.recurrent is None:
        raise SkippedCheck("layers with keys and values have no states")
    if not subject.can.prompt_checkpoints:
        raise SkippedCheck("capabilities do not claim them")
    for phase in sorted({Phase.PREFILL, Phase.MIXED} & subject.can.phases):
        bench = Workbench(subject, case)
        decoding = bench.turns([(9, 1), (30, 1)]) if phase is Phase.MIXED else []
        whole = bench.turns([(cached, new + 3) for cached, new in _CUT_PROMPTS])
        _keep_amid(bench, phase, decoding, [turn._replace(new=turn.new - 3) for turn in whole])


def _keep_amid(bench: Workbench, phase: Phase, decoding: list[Turn], prompts: list[Turn]) -> None:
    """Run them, and go on from the states that are kept, and from those at their ends."""
    pages, turns, before = [bench.tokens(1).states[0] for _ in prompts], [*decoding, *prompts], bench.memory()
    columns = torch.tensor([[0] * len(decoding) + pages, [0] * len(decoding) + [*_KEPT_AFTER]], dtype=torch.int32)
    batch = bench.batch(turns, phase)
    view = dataclasses.replace(batch.states, checkpoints_cpu=columns[0], checkpoint_rows_cpu=columns[1])
    found = bench.plan_and_attend(dataclasses.replace(batch, views={**batch.views, STATE: view}), turns)
    what, expected = f"{phase} with checkpoints after {_KEPT_AFTER} rows", [bench.expected(turn) for turn in turns]
    compare(found, expected, dtype=bench.case.dtype, leeway=bench.case.leeway, what=what)
    kept = [given for given in zip(prompts, pages, _KEPT_AFTER, strict=True) if given[2]]
    _check_unmoved(bench, before, turns, [page for _, page, _ in kept], "a state changes that is another's")
    resumed = [Turn(dataclasses.replace(turn.tokens, states=[page]), turn.cached + rows, 2) for turn, page, rows in kept]
    equals_formula(bench, resumed, Phase.PREFILL, " from checkpoints amid prompts")
    going_on = [turn._replace(cached=turn.cached + turn.new, new=3) for turn in prompts]
    equals_formula(bench, going_on, Phase.PREFILL, " behind prompts with checkpoints amid them")


@rule(mla_cases(PrefillStrategy.ABSORBED), "The piece with the step's own tokens is causal, chunks of the prefix are not.")
def mla_strategies(subject: Subject, case: AttnCase) -> str | None:
    """Every MLA prefill strategy gives what every other gives."""
    _only_in(subject, Phase.PREFILL)
    results: dict[PrefillStrategy, list[torch.Tensor]] = {}
    denied = []
    for strategy in (each.strategy for each in usual_cases(subject) if each.strategy is not None):
        bench = Workbench(subject, dataclasses.replace(case, strategy=strategy))
        turns = bench.turns([(0, 9), (CHUNK_TOKENS + 5, 6), (0, 1), (3, 20), (40, 3)])
        batch = bench.relay.plan(bench.batch(turns, Phase.PREFILL))
        out = bench.attend(batch, turns)
        if _strategies_of(batch) != {strategy}:
            denied.append(strategy)
            continue
        for other, theirs in results.items():
            compare(out, theirs, dtype=case.dtype, what=f"{strategy} against {other}")
        results[strategy] = out
    remark = f"the backend denies {', '.join(denied)}" if denied else None
    if len(results) < 2:
        raise SkippedCheck(remark or "capabilities claim one strategy only")
    return remark


def _strategies_of(batch: ForwardBatch) -> set[PrefillStrategy]:
    """The strategies with which the batch was planned."""
    assert isinstance(batch.plan, CompositePlan)
    return {part.strategy if isinstance(part, RaggedPart) else PrefillStrategy.ABSORBED for part in batch.plan.parts}


@rule(mla_cases(PrefillStrategy.CHUNKED), "State the kernel's base in Capabilities.lse_base; write -inf for rows that see nothing.")
def log_sum_exp(subject: Subject, case: AttnCase) -> None:
    """ChunkPlan.attend writes the log-sum-exp of scale q . k in the base that capabilities state, for empty pieces too."""
    _only_in(subject, Phase.PREFILL)
    bench = Workbench(subject, case)
    batch = bench.batch(bench.turns([(0, 5), (CHUNK_TOKENS + 9, 4), (7, 1)]), Phase.PREFILL)
    chunks, own = cut_pieces(batch.q_lens_cpu, batch.kv_lens_cpu, PrefillStrategy.CHUNKED, chunk_tokens=CHUNK_TOKENS)
    assert own is not None
    answer = bench.leaf.ask("init_mha_chunk_metadata", batch=batch, chunks=chunks, disable_ragged=False)
    if isinstance(answer, Denied):
        raise SkippedCheck(f"the backend denies it: {answer.reason}")
    if not isinstance(answer, ChunkPlan):
        raise BrokenRule(f"init_mha_chunk_metadata answers {answer!r}, neither a ChunkPlan nor Denied")
    for piece in (own, *chunks):
        _one_piece(bench, answer, piece, batch.q_lens_cpu.tolist(), base=subject.can.lse_base or "e")


def _one_piece(bench: Workbench, plan: ChunkPlan, piece: KVPiece, q_lens: list[int], *, base: str) -> None:
    facts, (query_dim, value_dim), lens = bench.case.facts, bench.dims, piece.lens_cpu.tolist()
    q, k, v = (
        bench.randn(rows, facts.num_heads, dim).to(bench.dtype)
        for rows, dim in ((sum(q_lens), query_dim), (sum(lens), query_dim), (sum(lens), value_dim))
    )
    out = bench.guarded_out(len(q))[1:-1]
    lse = torch.full(q.shape[:2], float("nan"), device=bench.device)
    plan.attend(q, k, v, bench.layer, piece, out, lse)
    row = key = 0
    for request, (num_rows, num_keys) in enumerate(zip(q_lens, lens, strict=True)):
        rows, keys = slice(row, row + num_rows), slice(key, key + num_keys)
        row, key = rows.stop, keys.stop
        what = f"piece {piece.index}, request {request}, {num_keys} keys"
        if not num_keys:
            if bool((lse[rows] != float("-inf")).any()) or bool((out[rows] != 0).any()):
                raise BrokenRule(f"{what}: rows that see nothing must have an output of 0 and a log-sum-exp of -inf")
            continue
        scale = bench.layer.scale
        wanted, wanted_lse = reference.attention(q[rows], k[keys], v[keys], facts=facts, scale=scale, causal=piece.causal)
        compare_lse(lse[rows], wanted_lse, dtype=bench.case.dtype, base=base, what=what)
        compare([out[rows]], [wanted], dtype=bench.case.dtype, what=what)


@rule(leaf_cases, "Fix the order of summation per request, whatever the batch; or do not claim batch_invariant.")
def batch_invariance(subject: Subject, case: AttnCase) -> None:
    """A request's results do not depend on what else is in the batch, to the last bit."""
    if not subject.can.batch_invariant:
        raise SkippedCheck("capabilities do not claim it")
    alone, bench = Workbench(subject, case), Workbench(subject, case)
    for (phase, turns), (_, others) in zip(alone.steps(), bench.steps(), strict=True):
        lengths = dict.fromkeys(turn.new for turn in turns)
        beside, _ = ({new: each.turns([(50, new)] * 3) for new in lengths} for each in (bench, alone))
        for turn, same in zip(turns, others, strict=True):
            together = [*beside[turn.new][:2], same, beside[turn.new][2]]
            batch = bench.pad(bench.batch(together, phase), requests=2, tokens=2)
            if not torch.equal(bench.plan_and_attend(batch, together)[2], alone.run([turn], phase)[0]):
                raise BrokenRule(f"{phase}: {turn.new} tokens after {turn.cached} differ alone from what they are beside others")


def _only_in(subject: Subject, phase: Phase) -> None:
    if phase not in subject.can.phases:
        raise SkippedCheck(f"capabilities do not claim phase {phase}")


NUMBERS: Final = (
    *(numbers, large_scores, ragged_lengths, long_tail, empty_batch, padding_only, padded_equals_unpadded),
    *(chunked_equals_whole, prefix_hit, states_after_verification, states_amid_prompts),
    *(mla_strategies, log_sum_exp, batch_invariance),
)
