"""The drafter of a running engine: an index for each request, options, and what it offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from enginery.api import CONTRACT_VERSIONS, ConfigError, DraftAsk, DraftContext, HookGroup, HostDrafter
from enginery_draft_lookup import register_drafters
from enginery_draft_lookup.spec import LOOKUP, LookupOptions


def drafter(**options: int) -> HostDrafter:
    return LOOKUP.build(DraftContext(vocab_size=100, options=LookupOptions(**options)))


def test_requests_do_not_mix_and_take_in_what_is_new() -> None:
    lookup = drafter()
    text = [1, 2, 3, 4, 5, 1, 2]
    assert lookup.propose([DraftAsk("a", text, 3), DraftAsk("b", [1, 2], 3)]) == [[3, 4, 5], []]
    assert lookup.propose([DraftAsk("a", [*text, 9, 2, 3], 2)]) == [[4, 5]]
    assert lookup.propose([DraftAsk("b", [1, 2, 7, 1, 2], 1)]) == [[7]]


def test_a_request_that_has_ended_is_forgotten() -> None:
    lookup = drafter()
    assert lookup.propose([DraftAsk("a", [1, 2, 3, 1, 2], 1)]) == [[3]]
    lookup.forget("a")
    lookup.forget("unknown")
    assert lookup.propose([DraftAsk("a", [1, 2], 1)]) == [[]]


def test_options_say_how_much_must_have_come_before() -> None:
    text = [1, 2, 3, 9, 3]
    assert drafter().propose([DraftAsk("a", text, 1)]) == [[]]
    assert drafter(least=1).propose([DraftAsk("a", text, 1)]) == [[9]]


@pytest.mark.parametrize(("least", "most"), [(0, 4), (3, 2)])
def test_options_that_would_find_nothing_are_refused(least: int, most: int) -> None:
    with pytest.raises(ConfigError, match=f"lookup.least is {least} and lookup.most is {most}; take 1 <= least <= most"):
        drafter(least=least, most=most)


def test_it_is_offered_once_for_this_contract() -> None:
    assert register_drafters() == [LOOKUP]
    assert LOOKUP.api == CONTRACT_VERSIONS[HookGroup.DRAFTER]


def test_the_package_imports_no_torch() -> None:
    code = "import sys, enginery_draft_lookup; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
