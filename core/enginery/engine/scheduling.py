"""The scheduler of an engine, with who counts its pages: of one lane, or of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from enginery.config.schema import EngineOptions, ScheduleSettings
from enginery.contracts.batch import STATE, WINDOW
from enginery.engine.build import BuiltParts
from enginery.kv.finite import FiniteMemory
from enginery.kv.kinds import WindowKind
from enginery.kv.pages import PageAllocator
from enginery.kv.prefix import NoPrefixCache, PrefixWatcher, RadixPrefixCache
from enginery.kv.resume import ResumePoints
from enginery.plugin.boundary import guarded_policy
from enginery.plugin.registry import Registry
from enginery.schedule.ahead import Ahead
from enginery.schedule.lanes import AnyScheduler, LaneScheduler
from enginery.schedule.scheduler import Drafts, Scheduler


class Scheduling(NamedTuple):
    """caches: the prefixes of each lane. ahead: of one lane with drafts."""

    scheduler: AnyScheduler
    caches: Sequence[RadixPrefixCache]
    ahead: Ahead | None

    def flush(self) -> tuple[int, bool]:
        """Free the cached pages that no request uses: how many, and whether none is left."""
        freed = sum(cache.evict(cache.num_evictable) for cache in self.caches)
        return freed, not any(cache.num_cached for cache in self.caches)


def scheduling_of(
    asked: EngineOptions,
    parts: BuiltParts,
    registry: Registry,
    *,
    watchers: Sequence[PrefixWatcher],
    drafting: Drafts | None,
) -> Scheduling:
    """watchers: of each lane's prefix cache, or none. drafting: where there is one lane."""
    caches = list[RadixPrefixCache]()
    offer = registry.schedule_policy(asked.schedule_policy)
    policy = guarded_policy(offer, registry.options_for(offer.name))

    def scheduler(lane: int) -> Scheduler:
        cache, allocator, finite = page_owners(parts, watchers[lane] if watchers else None)
        caches.append(cache)
        return Scheduler(
            _settings_of(asked, parts, lane),
            policy,
            cache=cache,
            allocator=allocator,
            finite=finite,
            eos_token_ids=parts.choice.checkpoint.eos_token_ids,
            drafting=drafting,
        )

    lanes = [scheduler(lane) for lane in range(asked.dp_attention)]
    if len(lanes) > 1:
        return Scheduling(LaneScheduler(lanes), caches, None)
    return Scheduling(lanes[0], caches, None if drafting is None else Ahead(lanes[0], drafting))


def _settings_of(asked: EngineOptions, parts: BuiltParts, lane: int) -> ScheduleSettings:
    settings = parts.choice.settings
    return ScheduleSettings(
        page_size=asked.page_size,
        num_pages=parts.memory.num_pages,
        max_model_len=settings.max_model_len,
        max_batch_tokens=settings.max_batch_tokens,
        max_batch_requests=settings.max_batch_requests,
        prefill_fraction=settings.prefill_fraction,
        max_queued_requests=asked.max_queued_requests,
        prefix_cache=settings.prefix_cache,
        vocab_size=parts.choice.facts.vocab_size,
        stages=asked.pp,
        first_seat=lane * settings.max_batch_requests,
    )


def page_owners(parts: BuiltParts, watcher: PrefixWatcher | None) -> tuple[RadixPrefixCache, PageAllocator, FiniteMemory]:
    """Who counts the pages of each kind that the memory plan gives, and the cache of their prefixes. watcher: of these."""
    memory, settings = parts.memory, parts.choice.settings
    allocator, window, states = PageAllocator(memory.num_pages), None, None
    others: dict[str, PageAllocator] = {}
    if memory.window is not None:
        window = WindowKind.of(memory.window_pages, window=memory.window, page_size=memory.page_size)
        others[WINDOW] = window.allocator
    if memory.state_pages:
        states = others[STATE] = PageAllocator(memory.state_pages)
    cache: RadixPrefixCache = NoPrefixCache()
    if settings.prefix_cache:
        points = ResumePoints(others, None if watcher is None else watcher.given_up) if others else None
        cache = RadixPrefixCache(memory.page_size, allocator, points, watcher)
    finite = FiniteMemory(
        memory.page_size,
        cache,
        window=window,
        states=states,
        largest_chunk=settings.max_batch_tokens,
        within_items=all(chosen.keeps_states_amid_prompts for chosen in parts.choice.attentions),
    )
    return cache, allocator, finite
