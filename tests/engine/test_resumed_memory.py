"""I2: what a request keeps of each kind of memory does not depend on whether it computed its prefix or found it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine.test_kinds_at_random import CONFIGS
from engine.test_noise_in_pages import noted_pools, stored_by_kind
from parity.engine_driver import generate, greedy, options
from parity.oracle import Oracle

from enginery.contracts.batch import FULL, STATE, WINDOW, MemoryKind
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

SIZE, NUM_TOLD = 4, 9  # tokens of a page; of the answer, when the memory is looked at


def kept_after(
    oracle: Oracle, registry: Registry, patch: pytest.MonkeyPatch, *, seen: list[list[int]]
) -> tuple[int, list[int], list[tuple[MemoryKind, torch.Tensor]]]:
    """Tokens found in the cache and told, and what layers keep of those: states, and rows of the pages. seen: prompts before."""
    pools, told = noted_pools(patch), list[int]()
    engine = Engine.build(options(oracle, page_size=SIZE, max_batch_tokens=24, overlap=False), registry)
    generate(engine, seen, max_tokens=1)
    engine.submit(greedy("a", oracle.prompts[5]))
    while len(told) < NUM_TOLD:
        outputs = engine.step()
        told += [token for output in outputs for token in output.token_ids]
    (request,) = engine._scheduler.table.running
    kv, count = request.kv, len(oracle.prompts[5]) + NUM_TOLD - 1  # the last token is not computed yet
    pages = {FULL: (0, kv.pages.tolist()), WINDOW: (kv.window.first, kv.window.pages.tolist())}
    kept = []
    for kind, tensors in stored_by_kind(pools):
        for tensor in tensors:
            if kind == STATE:
                kept.append((kind, tensor[kv.states.current].clone()))
            else:
                first, own = pages[kind]
                kept.append((kind, tensor[own].flatten(0, 1)[: count - first * SIZE]))
    return request.num_cached_tokens, told, kept


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_resumed_request_keeps_what_a_fresh_one_does(
    write_oracle: Callable[..., Oracle], registry: Registry, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It goes on from a point amid its prompt, in pages and chunks of other tokens than the fresh one's."""
    oracle = write_oracle(f"random {name}", CONFIGS[name])
    prompt, other = oracle.prompts[5], oracle.prompts[4]
    _, told, fresh = kept_after(oracle, registry, monkeypatch, seen=[])
    found, told_again, resumed = kept_after(oracle, registry, monkeypatch, seen=[other, prompt[:41]])
    assert (found, told_again) == (40, told)
    assert {kind for kind, _ in fresh} == {
        WINDOW if name in ("gemma2", "gpt-oss") else STATE,
        *([] if name == "mamba2" else [FULL]),
    }
    for (kind, ours), (_, theirs) in zip(resumed, fresh, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0, msg=lambda text, kind=kind: f"{kind}: {text}")
