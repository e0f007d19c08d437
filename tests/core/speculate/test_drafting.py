"""Who is asked for drafts, for how many, and what becomes of what a drafter says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from core.schedule.device import asked_of
from offers import offering

from enginery.config.schema import EngineOptions
from enginery.contracts.batch import Phase
from enginery.contracts.drafting import ON_DEVICE, DraftAsk, DraftContext, DrafterSpec, DraftTree
from enginery.contracts.request import RequestOutput, SamplingParams
from enginery.contracts.step import Items, StepInput
from enginery.contracts.versions import HookGroup
from enginery.errors import ConfigError, PluginError
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery.schedule.request import Request
from enginery.schedule.table import RequestTable
from enginery.speculate.drafting import Drafting
from enginery.speculate.length import DraftLength
from enginery.speculate.made_drafts import Made, MadeDrafts
from enginery.worker.drafts.choice import MOST_MEASURED, choose_drafter


class Noting:
    """Guesses 1, 2, 3, ... and notes what it is asked."""

    def __init__(self) -> None:
        self.asks: list[DraftAsk] = []
        self.forgotten: list[str] = []

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        self.asks = list(asks)
        return [range(1, 100) for _ in asks]

    def forget(self, key: str) -> None:
        self.forgotten.append(key)


def offer_of(drafter: object, *, most: int = 8) -> Offer[DrafterSpec]:
    def build(context: DraftContext) -> Noting:
        if isinstance(drafter, Exception):
            raise drafter
        assert (context.vocab_size, context.options) == (50, "its options")
        return cast("Noting", drafter)

    spec = DrafterSpec(name="noting", api=(2, 0), summary="", most=most, build=build)
    return Offer(spec=spec, group=HookGroup.DRAFTER, name="noting", plugin="p", distribution="enginery-p", version="1.2")


REGISTRY = cast("Registry", SimpleNamespace(options_for=lambda name: "its options"))


def drafting_of(drafter: object) -> Drafting:
    return Drafting.of_host(offer_of(drafter), REGISTRY, length=DraftLength(3, fixed=3), vocab_size=50)


def running(
    request_id: str,
    *,
    num_tokens: int = 5,
    computed: int | None = None,
    limit: int = 100,
    num_unfollowed: int = 0,
    **fields: object,
) -> SimpleNamespace:
    asked = dataclasses.replace(asked_of(request_id, range(3)), **fields)
    computed = num_tokens - 1 if computed is None else computed
    return SimpleNamespace(
        request_id=request_id,
        asked=asked,
        token_ids=list(range(num_tokens)),
        num_left=num_tokens - computed,
        num_computed=computed,
        num_unfollowed=num_unfollowed,
        limit=limit,
        grammar=None,
    )


def table_of(*requests: SimpleNamespace) -> RequestTable:
    return cast("RequestTable", SimpleNamespace(running=requests, by_id={each.request_id: each for each in requests}))


def auto_drafting() -> Drafting:
    """Of a draft model; how much is guessed is measured."""
    return Drafting(MadeDrafts(), offer_of(Noting()), length=DraftLength(3), vocab_size=50)


@pytest.mark.parametrize(("unfollowed", "speculation", "guessed"), [(10, True, 3), (11, True, 0), (0, False, 0)])
def test_a_draft_model_guesses_for_nobody_that_it_has_not_followed(unfollowed: int, guessed: int, *, speculation: bool) -> None:
    """Nor where nobody wants guesses. One request that it knows is enough, as all get the same rows."""
    params = SamplingParams(speculation=speculation)
    one = running("a", num_tokens=41, num_unfollowed=unfollowed, params=params)
    assert auto_drafting().length([cast("Request", one)], 1) == guessed
    fresh = running("b", num_tokens=9, computed=8)
    assert auto_drafting().length([cast("Request", one), cast("Request", fresh)], 2) == 3
    fixed = Drafting(MadeDrafts(), offer_of(Noting()), length=DraftLength(3, fixed=3), vocab_size=50)
    assert fixed.length([cast("Request", one)], 1) == 3


def test_no_trial_begins_with_many_tokens_of_prompts() -> None:
    """They would be followed for it. What is found to pay is guessed then too."""
    length, fresh = DraftLength(3, device="cuda"), [cast("Request", running("a", num_tokens=9, computed=8))]
    drafting = Drafting(MadeDrafts(), offer_of(Noting()), length=length, vocab_size=50)
    assert drafting.length(fresh, 64, 8192) == 3
    for _ in range(40):
        length.told([(1, 0)])
    while not (length.found(64) == 0 and length.of(64)):
        length.took(64, length.of(64), 1.0 + length.of(64))
    assert (drafting.length(fresh, 64, 512), drafting.length(fresh, 64, 8192)) == (1, 0)


def test_guesses_for_what_was_not_followed_teach_nothing() -> None:
    drafting, step = auto_drafting(), StepInput(number=0, phase=Phase.VERIFY, decode_len=3)
    requests = [running("a", num_tokens=41), running("b", num_tokens=41, num_unfollowed=30)]
    told = [RequestOutput(request_id=name, num_drafted=2, num_accepted=count) for name, count in (("a", 2), ("b", 0))]
    for _ in range(200):
        drafting.published(step, cast("Sequence[Request]", requests), told)
    assert drafting.lengths.told_each_step(2) > 2.9


def combs_of(tokens: tuple[int, ...], *, is_read: bool) -> MadeDrafts:
    """Of a request with five tokens: three guesses, and one token beside each."""
    made = MadeDrafts(siblings=1)
    made.keep(Made({"r": (5, 0)}, len(tokens), lambda place: tokens, is_read=is_read))
    return made


@pytest.mark.parametrize(("is_read", "reads", "known"), [(True, False, True), (False, False, False), (False, True, True)])
def test_guesses_with_tokens_beside_them_branch(*, is_read: bool, reads: bool, known: bool) -> None:
    tokens = (4, 7, 9, 5, 6, 8)
    made, request, another = combs_of(tokens, is_read=is_read), running("r"), running("r", num_tokens=6)
    request.reads_tokens = another.reads_tokens = reads
    assert made.depth == 3
    expected = tokens if known else (ON_DEVICE,) * 6
    wanted = cast("list[tuple[Request, int]]", [(request, 6), (request, 4), (another, 6)])
    parents = (-1, 0, 1, -1, 0, 1)
    assert made.of(wanted) == [("r", DraftTree(expected, parents)), ("r", DraftTree(expected[:4], parents[:4]))]
    made.keep(None)
    assert made.of(wanted) == []


def test_what_is_learnt_of_combs_is_learnt_of_their_depths() -> None:
    """Three guesses that were right say nothing of a fourth, though twice as many tokens were verified."""
    made = combs_of((4, 7, 9, 5, 6, 8), is_read=True)
    drafting = Drafting(made, offer_of(Noting()), length=DraftLength(7, siblings=1), vocab_size=50)
    request = running("r")
    request.reads_tokens = False
    assert len(drafting.propose(table_of(request))["r"]) == 6
    step, told = StepInput(number=0, phase=Phase.VERIFY, decode_len=7), RequestOutput(request_id="r", num_drafted=6, num_accepted=3)
    before = drafting.lengths._accepted[3]
    for _ in range(50):
        drafting.published(step, [cast("Request", request)], [told])
    assert min(drafting.lengths._accepted[:3]) > 0.95
    assert drafting.lengths._accepted[3] == before


def told_at(drafting: Drafting, at_s: float, *, decode_len: int, draft_len: int, num_tokens: int = 1) -> None:
    """A step of one request, told then."""
    drafting._clock = lambda: at_s
    phase = Phase.DECODE if decode_len == 1 else Phase.VERIFY
    items = np.ones((1, len(Items._fields)), np.int32).tobytes()
    step = StepInput(number=0, phase=phase, decode_len=decode_len, draft_len=draft_len, num_decode=1, items=items)
    drafting.published(step, [cast("Request", running("a"))], [RequestOutput(request_id="a", token_ids=[1] * num_tokens)])


def test_what_a_trial_takes_is_lost_by_the_clock() -> None:
    """Of steps amid a change of lengths too, in which graphs are captured."""
    drafting = Drafting(MadeDrafts(), offer_of(Noting()), length=DraftLength(3), vocab_size=50)
    length, at = drafting.lengths, 0
    while not (tried := length.of(8)):
        length.took(8, 0, 1.0)
    load = length._loads[3]
    assert load.lost_s == 0
    drafting._before = None
    for at, (decode_len, draft_len) in enumerate([(1, 0), (1, tried), (1 + tried, tried), (1 + tried, tried)]):
        drafting._clock = lambda at=at: 60.0 * at  # type: ignore[misc]
        items = np.ones((8, len(Items._fields)), np.int32).tobytes()
        step = StepInput(number=at, phase=Phase.VERIFY, decode_len=decode_len, draft_len=draft_len, num_decode=8, items=items)
        drafting.published(step, [], [])
    assert at == 3
    assert load.lost_s > 170


def test_what_a_drafter_of_the_host_finds_is_learnt_and_timed() -> None:
    """Whatever no draft model followed. What a step took that waited for guesses, or followed one that verified, says less."""
    drafting = Drafting.of_host(offer_of(Noting()), REGISTRY, length=DraftLength(3), vocab_size=50)
    table, request = table_of(running("a", num_unfollowed=5)), running("a", num_unfollowed=5)
    assert drafting.length([cast("Request", request)], 1) == 0, "nothing is guessed on the device"
    assert drafting.propose(table) == {}, "what a step takes without is not known"
    for at in range(4):
        told_at(drafting, float(at), decode_len=1, draft_len=0)
    assert drafting.propose(table) == {"a": [1, 2, 3]}
    assert drafting.waits(table)
    told_at(drafting, 3.1, decode_len=1, draft_len=0)
    told_at(drafting, 6.1, decode_len=4, draft_len=0, num_tokens=1)
    told_at(drafting, 8.1, decode_len=1, draft_len=0)
    load = drafting.lengths._loads[0]
    assert load.seconds[0] == 1.0
    assert load.lost_s == pytest.approx(3.0), "two by the verification, one as the next step began late"


class Forward:
    """A grammar's state that cannot go back."""

    is_finished = False

    def fill_mask(self, row: object) -> None: ...

    def accept(self, token_id: int) -> bool:
        return True


class Backward(Forward):
    def rollback(self, count: int) -> None: ...


def test_who_decodes_is_asked_for_as_many_as_its_limit_has_room_for() -> None:
    drafter = Noting()
    drafts = drafting_of(drafter).propose(
        table_of(
            running("a"), running("prompt", computed=2), running("short", limit=7, cache_salt="mine"), running("full", limit=6)
        )
    )
    assert [(ask.key, list(ask.token_ids), ask.most, ask.salt) for ask in drafter.asks] == [
        ("a", [0, 1, 2, 3, 4], 3, ""),
        ("short", [0, 1, 2, 3, 4], 1, "mine"),
    ]
    assert drafts == {"a": [1, 2, 3], "short": [1]}


@pytest.mark.parametrize(
    ("request_", "is_asked"),
    [
        (running("r", params=SamplingParams(speculation=False)), False),
        (running("r", embed=True), False),
        (SimpleNamespace(**vars(running("r")) | {"grammar": Forward()}), False),
        (SimpleNamespace(**vars(running("r")) | {"grammar": Backward()}), True),
    ],
    ids=["unwanted", "embedding", "forward", "backward"],
)
def test_some_requests_are_not_drafted(request_: SimpleNamespace, *, is_asked: bool) -> None:
    drafter = Noting()
    drafting = drafting_of(drafter)
    assert bool(drafting.propose(table_of(request_))) is is_asked
    assert bool(drafter.asks) is is_asked


def test_a_guess_ends_before_what_is_no_token_which_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    drafter = Noting()
    drafting, table = drafting_of(drafter), table_of(running("a"), running("b"), running("c"))
    assert drafting.propose(table)
    assert caplog.messages == []
    drafter.propose = lambda asks: [[7, 50, 3], [-1], ()]  # type: ignore[method-assign]
    assert drafting.propose(table) == drafting.propose(table) == {"a": [7]}
    (said,) = caplog.messages
    assert "enginery-p==1.2) guessed token 50 of a vocabulary of 50; a guess ends before such a one" in said


def test_who_has_ended_is_forgotten_even_if_another_has_its_name() -> None:
    drafter = Noting()
    drafting = drafting_of(drafter)
    first, other = running("r"), running("other")
    drafting.propose(table_of(first, other))
    drafting.propose(table_of(first))
    assert drafter.forgotten == ["other"]
    drafting.propose(table_of(running("r")))
    assert drafter.forgotten == ["other", "r"]


def test_who_is_stopped_is_asked_no_more_until_its_name_is_new() -> None:
    drafting, request = drafting_of(Noting()), running("r")
    assert drafting.propose(table_of(request))
    drafting.stop([request])
    assert not drafting.propose(table_of(request))
    assert drafting.propose(table_of(running("r")))


def test_a_drafter_that_cannot_be_built_is_named() -> None:
    with pytest.raises(PluginError, match=r"enginery-p==1\.2\) could not build the drafter: .*no room"):
        drafting_of(ValueError("no room"))


def test_a_method_that_does_not_take_what_it_is_given_is_found_at_the_start() -> None:
    class NoKey(Noting):
        def forget(self) -> None:  # type: ignore[override]
            pass

    class Wanting(Noting):
        def propose(self, asks: Sequence[DraftAsk], lengths: object) -> list[Sequence[int]]:  # type: ignore[override]
            return []

    class Renamed(Noting):
        def propose(self, requests: Sequence[DraftAsk], *, most: int = 3) -> list[Sequence[int]]:  # type: ignore[override]
            return []

    told = r"plugin p \(enginery-p==1\.2\): {} lacks HostDrafter\.{}\(self, {}: .*: {}"
    with pytest.raises(PluginError, match=told.format("NoKey", "forget", "key", "too many positional arguments")):
        drafting_of(NoKey())
    with pytest.raises(PluginError, match=told.format("Wanting", "propose", "asks", "missing a required argument: 'lengths'")):
        drafting_of(Wanting())
    assert drafting_of(Renamed()).failure == ""


@pytest.mark.parametrize("fixed", [None, 3])
def test_nothing_is_captured_for_guesses_of_a_drafter_that_failed(fixed: int | None) -> None:
    """In idle moments graphs are captured for the `found` number of guesses."""

    class Failing(Noting):
        def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
            raise ValueError("no guess")

    drafting = Drafting.of_host(offer_of(Failing()), REGISTRY, length=DraftLength(3, fixed=fixed), vocab_size=50)
    found = drafting.lengths.found
    assert found(1)
    assert drafting.propose(table_of(running("r"))) == {}
    assert "no guess" in drafting.failure
    assert not found(1)


def test_a_function_that_does_not_take_what_it_is_given_is_told_with_its_own_line() -> None:
    def build() -> Noting:
        return Noting()

    offer = offer_of(Noting())
    offer = dataclasses.replace(offer, spec=dataclasses.replace(offer.spec, build=build))
    told = rf"takes 0 positional arguments but 1 was given \({__file__}, line {build.__code__.co_firstlineno}\)"
    with pytest.raises(PluginError, match=rf"could not build the drafter: TypeError: .*build\(\) {told}"):
        Drafting.of_host(offer, REGISTRY, length=DraftLength(3), vocab_size=50)


def chosen(*, most: int = 8, shipped: tuple[str, ...] = (), modules: object = None, **asked: str) -> tuple[str | None, int]:
    offer = offer_of(Noting(), most=most)
    offer = dataclasses.replace(offer, spec=dataclasses.replace(offer.spec, modules=modules))  # type: ignore[arg-type]
    bare = Registry.load(no_plugins=True)
    registry = offering(bare, DrafterSpec, offer, *bare.offers(DrafterSpec))
    taken, length, *_ = choose_drafter(
        EngineOptions(**asked),  # type: ignore[arg-type]
        registry,
        shipped=dict.fromkeys(shipped, Path("somewhere")),
        config={"architectures": ["Any"]},
        folder=Path("somewhere"),
    )
    return None if taken is None else taken.name, length


def test_nothing_is_guessed_unless_a_drafter_is_named() -> None:
    assert chosen() == (None, 0)
    assert chosen(drafter="noting") == ("noting", MOST_MEASURED)
    assert chosen(drafter="noting", most=2) == ("noting", 2)
    assert chosen(drafter="noting", draft_length="7") == ("noting", 7)
    with pytest.raises(PluginError, match=r"there is no drafter 'other'\. Known: auto, noting, off, standalone"):
        chosen(drafter="other")


def test_auto_takes_what_comes_with_the_model(tmp_path: Path) -> None:
    assert chosen(drafter="auto") == (None, 0)
    assert chosen(drafter="auto", shipped=("missing", "standalone", "noting")) == ("standalone", 7)
    assert chosen(drafter="auto", shipped=("standalone",), draft_length="2") == ("standalone", 2)
    (tmp_path / "config.json").write_text('{"architectures": ["AnyForCausalLM"]}')
    assert chosen(drafter="auto", draft_model=str(tmp_path)) == ("standalone", 7)


def test_more_than_the_drafter_is_good_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--draft-length is 9, but noting, from .*, is good for 8 at most; take fewer"):
        chosen(drafter="noting", draft_length="9")
