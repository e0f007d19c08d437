"""Several names of one model: listed, echoed, and refused where they are none."""

from __future__ import annotations

import pytest

from enginery.config.schema import EngineOptions
from enginery.config.sources import served_names
from enginery.errors import ConfigError

ASKED = [{"role": "user", "content": "hi"}]


def test_every_served_name_is_listed_and_echoed(with_server):
    async def scenario(live):
        cards = (await live.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["big", "owner/small"]
        assert (await live.http.get("/v1/models/owner/small")).json()["id"] == "owner/small"
        for asked, answered in (("big", "big"), ("owner/small", "owner/small"), (None, "big")):
            named = {} if asked is None else {"model": asked}
            replies = [
                await live.chat("hi", **named),
                await live.complete("hi", **named),
                await live.post("/v1/embeddings", input="hi", **named),
                await live.post("/v1/responses", input="hi", **named),
                await live.post("/v1/messages", messages=ASKED, max_tokens=5, **named),
            ]
            assert [(reply.status_code, reply.json()["model"]) for reply in replies] == [(200, answered)] * 5
            (first, *_) = await live.events("/v1/chat/completions", messages=ASKED, **named)
            assert first["model"] == answered
        for path in ("/v1/chat/completions", "/tokenize"):
            refused = await live.post(path, messages=ASKED, model="other")
            assert refused.status_code == 404
            assert "'big' and 'owner/small' are" in refused.json()["error"]["message"]
        assert 'model_name="big"' in (await live.http.get("/metrics")).text

    with_server(scenario, served_model_name="big, owner/small")


@pytest.mark.parametrize("names", ["", "a,", "a,,b", "a,a", " , "])
def test_names_that_are_empty_or_twice_are_refused(names):
    with pytest.raises(ConfigError, match=r"--served-model-name .* has an empty name or one twice"):
        served_names(EngineOptions(served_model_name=names), "m")
