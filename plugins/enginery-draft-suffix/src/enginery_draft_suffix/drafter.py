"""Keeps the suffix trees up to date with what was told, and asks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from enginery.api import ConfigError, DraftAsk, DraftTree
from enginery_draft_suffix.spec import SuffixOptions


class Found(Protocol):
    """What the trees guess: the part of `arctic_inference.suffix_decoding.SuffixDecodingDraft` that is used.

    parents: of each token the place of the one before it, -1 for the context's last; those that come first are likeliest.
    """

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def parents(self) -> Sequence[int]: ...


class SuffixTrees(Protocol):
    """The part of `arctic_inference.suffix_decoding.SuffixDecodingCache` that is used."""

    def start_request(self, req_id: str, prompt_token_ids: Sequence[int]) -> None: ...

    def stop_request(self, req_id: str) -> None: ...

    def add_active_response(self, req_id: str, token_ids: Sequence[int]) -> None: ...

    def speculate(
        self,
        req_id: str,
        context: Sequence[int],
        max_spec_tokens: int,
        max_spec_factor: float,
        *,
        min_token_prob: float,
        use_tree_spec: bool,
    ) -> Found: ...


def open_trees(options: SuffixOptions) -> SuffixTrees:
    """Empty ones. Raises `ConfigError` where Arctic Inference is not installed."""
    try:
        from arctic_inference.suffix_decoding import SuffixDecodingCache
    except ImportError as error:
        raise ConfigError(
            f"--drafter suffix needs Arctic Inference, which cannot be imported: {error}; "
            'pip install torch "cmake<4" ninja nanobind setuptools wheel, then pip install --no-build-isolation arctic-inference, '
            "or take --drafter lookup"
        ) from error
    trees: SuffixTrees = SuffixDecodingCache(options.depth, options.cached_requests)
    return trees


class _Salted:
    """The trees of the requests with one salt. active: keys of those that run."""

    def __init__(self, trees: SuffixTrees) -> None:
        self.trees = trees
        self.active: set[str] = set()


class SuffixDrafter:
    """Implements `HostDrafter`. open_trees: empty ones, of prompts by request and of all answers, for requests with one salt.

    A guess shows in the time that an answer takes, so what one client is told is no guess for another with another salt.
    """

    def __init__(self, open_trees: Callable[[], SuffixTrees], options: SuffixOptions) -> None:
        self._open = open_trees
        self._options = options
        self._by_salt: dict[str, _Salted] = {"": _Salted(open_trees())}  # the one used last is the last
        self._salt_of: dict[str, str] = {}
        self._num_seen: dict[str, int] = {}

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        """The best path of each, or all paths that are likely enough (`SuffixOptions.trees`)."""
        for ask in asks:
            self._take_in(ask)  # all of them first: one request may go on as another just has
        return [self._propose(ask) for ask in asks]

    def forget(self, key: str) -> None:
        """Drop its prompt. Its answer stays for others, until `cached_requests` newer ones have come."""
        if self._num_seen.pop(key, None) is not None:
            own = self._by_salt[self._salt_of.pop(key)]
            own.active.remove(key)
            own.trees.stop_request(key)

    def _take_in(self, ask: DraftAsk) -> None:
        """What is new. A request is first asked about when its first token has been told."""
        seen = self._num_seen.get(ask.key)
        if seen is None:
            seen = len(ask.token_ids) - 1
            own = self._begin(ask)
            own.trees.start_request(ask.key, list(ask.token_ids[:seen]))
        self._of(ask).add_active_response(ask.key, list(ask.token_ids[seen:]))
        self._num_seen[ask.key] = len(ask.token_ids)

    def _of(self, ask: DraftAsk) -> SuffixTrees:
        return self._by_salt[ask.salt].trees

    def _begin(self, ask: DraftAsk) -> _Salted:
        """The trees of its salt, which are used last now. Of too many those used longest ago go, unless requests run."""
        own = self._by_salt.pop(ask.salt, None) or _Salted(self._open())
        self._by_salt[ask.salt] = own
        own.active.add(ask.key)
        self._salt_of[ask.key] = ask.salt
        idle = [salt for salt, each in self._by_salt.items() if not each.active]
        for salt in idle[: max(0, len(self._by_salt) - self._options.salts)]:
            del self._by_salt[salt]
        return own

    def _propose(self, ask: DraftAsk) -> Sequence[int]:
        options = self._options
        context, shares = list(ask.token_ids[-options.depth :]), {"min_token_prob": options.least_share}
        found = self._of(ask).speculate(ask.key, context, ask.most, options.factor, use_tree_spec=options.trees, **shares)
        return DraftTree(tuple(found.token_ids), tuple(found.parents)) if options.trees else list(found.token_ids)
