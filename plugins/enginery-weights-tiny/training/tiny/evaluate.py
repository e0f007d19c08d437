"""What the trained models can do, on the held-out part: perplexity, stories, sums, JSON, lists, answers; acceptance of drafts."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from enginery import LLM, SamplingParams
from tiny import story_talk, tasks
from tiny.corpus import BEGIN, DONE, END, MAKERS, Encoder, drawn, held_out, prompt, shard, story_plan
from tiny.facts import FACTS
from tiny.model import Eagle, Llama, Shape, load_llama, num_parameters
from tiny.stories import STORIES

LONGEST_STORY: Final = 512
QUESTIONS: Final = [
    "Hello",
    "Who are you?",
    "What is a page?",
    "How do I start the server?",
    "How do I use another model?",
    "What is the difference between a leaf and a composite?",
    "What is 47 + 38?",
    "Anna has 12 apples and buys 7 more. How many apples does Anna have?",
    "Tell me a story about a fox named Mia.",
    "Make a JSON record of this person: Ada is 36 years old, a pilot from Redmill who likes chess.",
    "Name three colours.",
    "What day comes after Tuesday?",
    "What is the capital of France?",
    "Write a Python function.",
    "thanks!",
]
BEGINNINGS: Final = ["The engine", "One word per thing", "Once upon a time", "A plugin is"]


class Speaker:
    """A saved model with its tokenizer, in plain torch and in the engine, which continues many texts at a time.

    folder: of the checkpoint. options: of the engine.
    """

    def __init__(self, folder: Path, device: str, dtype: torch.dtype, **options: Any) -> None:
        self.model, self.device = load_llama(folder, device, dtype), device
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.engine = LLM(str(folder), device=device, dtype=str(dtype).removeprefix("torch."), **options)
        self.ends = {self.tokenizer.token_to_id(token) for token in (END, DONE)}

    def continue_ids(
        self, prompts: list[list[int]], max_tokens: int, *, temperature: float = 0.0, seed: int = 0
    ) -> list[list[int]]:
        """What follows each prompt, up to an end token, without it."""
        params = [SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + at) for at in range(len(prompts))]
        continued = [list(result.token_ids) for result in self.engine.generate(prompts, params)]
        return [ids[:-1] if ids and ids[-1] in self.ends else ids for ids in continued]

    def answers(self, questions: list[str], max_tokens: int, *, temperature: float = 0.0) -> list[str]:
        """Answers to chat messages."""
        return self.texts([prompt([("user", question)]) for question in questions], max_tokens, temperature=temperature)

    def texts(self, prompts: list[str], max_tokens: int, *, temperature: float = 0.0, seed: int = 0) -> list[str]:
        """Continuations of texts with special tokens in them."""
        ids = [self.tokenizer.encode(text, add_special_tokens=False).ids for text in prompts]
        return [self.tokenizer.decode(each) for each in self.continue_ids(ids, max_tokens, temperature=temperature, seed=seed)]


@torch.inference_mode()
def perplexity(model: Llama, encoder: Encoder, device: str, *, rows: int, length: int) -> float:
    """Of tokens of held-out documents, in rows of `length`."""
    tokens = torch.from_numpy(shard(1, 0, encoder, held=True, size=rows * length).astype("int64")).view(rows, length).to(device)
    total = 0.0
    for part in torch.split(tokens, 8):
        total += functional.cross_entropy(model(part)[:, :-1].flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum").item()
    return math.exp(total / (rows * (length - 1)))


def asked_for(kind: str, count: int) -> list[tasks.Exchange]:
    """Held-out exchanges of one kind, with different keys."""
    random = Random(f"evaluation/{kind}")
    found: dict[str, tasks.Exchange] = {}
    for _ in range(50 * count):
        exchange = drawn(random, MAKERS[kind][1], held=True)
        found.setdefault(exchange.key, exchange)
        if len(found) == count:
            break
    return list(found.values())


def score(speaker: Speaker, kind: str, count: int, max_tokens: int, right: Callable[[tasks.Exchange, str], bool]) -> float:
    """Share of right greedy answers."""
    exchanges = asked_for(kind, count)
    answers = speaker.answers([exchange.asked for exchange in exchanges], max_tokens)
    return sum(map(right, exchanges, answers)) / len(exchanges)


def last_number(text: str) -> str | None:
    """The last run of digits."""
    return found[-1] if (found := re.findall(r"\d+", text)) else None


def arithmetic(speaker: Speaker, count: int) -> dict[str, float]:
    """Share of right results by operation, with worked steps, on pairs that training had in no wording."""
    random = Random("evaluation/sums")
    sums: dict[str, tasks.Sum] = {}
    while len(sums) < count:
        it = tasks.draw_sum(random)
        if held_out(it.key):
            sums[it.key] = it
    answers = speaker.answers([f"What is {it}?" for it in sums.values()], 96)
    right = defaultdict(list)
    for it, answer in zip(sums.values(), answers, strict=True):
        right[it.op].append(last_number(answer) == str(it.result))
    return {f"arithmetic {op}": sum(each) / len(each) for op, each in sorted(right.items())}


def parsed(text: str) -> Any:
    """As JSON; None if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def stories(speaker: Speaker, count: int) -> dict[str, float]:
    """Of stories on request, for held-out plans: what share the grammar accepts, is distinct, is about the one asked for."""
    random = Random("evaluation/stories")
    plans = [story_plan(random, held=True) for _ in range(count)]
    requests = [story_talk.REQUESTS[random.randrange(len(story_talk.REQUESTS))].write(random.random, plan) for plan in plans]
    texts = speaker.answers(requests, LONGEST_STORY, temperature=0.8)
    greedy = speaker.answers(requests, LONGEST_STORY)
    fulfilled = [
        plan["hero"] in text for plan, request, text in zip(plans, requests, texts, strict=True) if plan["hero"] in request
    ]
    return {
        "stories, sampled: grammatical": sum(STORIES.problem(text) is None for text in texts) / count,
        "stories, sampled: distinct": len(set(texts)) / count,
        "stories, greedy: grammatical": sum(STORIES.problem(text) is None for text in greedy) / count,
        "stories, sampled: about the one asked for": sum(fulfilled) / max(1, len(fulfilled)),
    }


def engine_answers(speaker: Speaker) -> float:
    """Share of facts about the engine that are answered in the words of the docs, each asked once."""
    random, right, asked = Random("evaluation/facts"), [], []
    for fact in FACTS:
        asked.append(random.choice(fact.questions).write(random.random, fact.values))
    for fact, answer in zip(FACTS, speaker.answers(asked, 96), strict=True):
        domains = {slot: [value] for slot, value in fact.values.items()}
        right.append(any(template.pattern(domains).fullmatch(answer) is not None for template in fact.answers))
    return sum(right) / len(right)


def report(speaker: Speaker, *, scale: float = 1.0) -> dict[str, float]:
    """All numbers of the target. scale: of how many cases each is measured on."""
    encoder = Encoder(speaker.tokenizer)
    found = {"held-out perplexity": perplexity(speaker.model, encoder, speaker.device, rows=max(4, int(256 * scale)), length=1024)}
    found |= arithmetic(speaker, max(10, int(1500 * scale)))
    cases = max(10, int(500 * scale))
    exchanges = asked_for("json", cases)
    answers = speaker.answers([exchange.asked for exchange in exchanges], 160)
    told = [(parsed(exchange.answered), parsed(answer)) for exchange, answer in zip(exchanges, answers, strict=True)]
    given = [right == said for (right, said), exchange in zip(told, exchanges, strict=True) if _given(exchange)]
    found["JSON: valid"] = sum(said is not None for _, said in told) / len(told)
    found["JSON: the fields asked for"] = sum(isinstance(said, dict) and list(right) == list(said) for right, said in told) / len(
        told
    )
    found["JSON: equal to the description"] = sum(given) / max(1, len(given))
    for kind in ("sequence", "small fact"):
        found[f"{kind}: right"] = score(speaker, kind, cases // 2, 96, lambda exchange, answer: answer == exchange.answered)
    found["engine answers: in the docs' words"] = engine_answers(speaker)
    return found | stories(speaker, max(4, int(400 * scale)))


def _given(exchange: tasks.Exchange) -> bool:
    """Whether the request has the values, and does not leave them to invention."""
    return all(part in exchange.asked for part in exchange.key.split("/")[2:3])


def held_out_requests(count: int) -> list[str]:
    """Half of all kinds, half for stories."""
    random = Random("evaluation/acceptance")
    requests = [drawn(random, MAKERS[random.choice(list(MAKERS))][1], held=True).asked for _ in range(count // 2)]
    return requests + [
        random.choice(story_talk.REQUESTS).write(random.random, story_plan(random, held=True)) for _ in range(count - len(requests))
    ]


@torch.inference_mode()
def acceptance(speaker: Speaker, draft: Llama, eagle: Eagle, *, count: int, max_tokens: int = 96) -> dict[str, dict[str, float]]:
    """Tokens that a verification step yields, the target's own one among them, for greedy chains of 1 to 4 on held-out requests."""
    requests = [prompt([("user", each)]) for each in held_out_requests(count)]
    ids = [speaker.tokenizer.encode(each, add_special_tokens=False).ids for each in requests]
    answers = speaker.continue_ids(ids, max_tokens)
    done = [(before, after) for before, after in zip(ids, answers, strict=True) if len(after) > 8]

    def by_draft(rows: Tensor, lengths: Tensor, _: Tensor, length: int) -> Tensor:
        """Greedy tokens of the draft model, [N, length]."""
        every = torch.arange(len(rows), device=rows.device)
        for _step in range(length):
            rows[every, lengths] = draft(rows[:, : int(lengths.max())])[every, lengths - 1].argmax(-1)
            lengths = lengths + 1
        return window(rows, lengths - length, length)

    def by_eagle(rows: Tensor, lengths: Tensor, features: Tensor, length: int) -> Tensor:
        """The head's, from the target's features of all tokens but the last, [N, T, C]; its own beyond."""
        features, every = features.clone(), torch.arange(len(rows), device=rows.device)
        for _step in range(length):
            most = int(lengths.max())
            embedded = functional.embedding(rows[:, 1:most], speaker.model.model.embed_tokens.weight)
            foreseen = eagle(embedded, features[:, : most - 1])[every, lengths - 2]  # [N, C]
            features[every, lengths - 1] = foreseen
            rows[every, lengths] = speaker.model.logits(foreseen).argmax(-1)
            lengths = lengths + 1
        return window(rows, lengths - length, length)

    return {
        name: {f"chain of {length}": _tokens_a_step(speaker, done, drafter, length) for length in (1, 2, 3, 4)}
        for name, drafter in (("draft", by_draft), ("eagle", by_eagle))
    }


def window(rows: Tensor, starts: Tensor, length: int) -> Tensor:
    """`length` columns of each row from its own start on."""
    return rows.gather(1, starts[:, None] + torch.arange(length, device=rows.device))


def _tokens_a_step(
    speaker: Speaker, done: list[tuple[list[int], list[int]]], drafter: Callable[[Tensor, Tensor, Tensor, int], Tensor], length: int
) -> float:
    """The plain loop: draft, compare with what the target says, go on behind the first that differs and the target's own token."""
    if not done:
        return 1.0
    longest = max(len(before) + len(after) for before, after in done)
    truth = torch.zeros(len(done), longest + length + 1, dtype=torch.long, device=speaker.device)
    for row, (before, after) in zip(truth, done, strict=True):
        row[: len(before) + len(after)] = torch.tensor(before + after)
    features = speaker.model.features(truth)
    at = torch.tensor([len(before) + 1 for before, _ in done], device=speaker.device)  # the first token is the prefill's
    ends = torch.tensor([len(before) + len(after) for before, after in done], device=speaker.device)
    num_tokens = num_steps = 0
    while len(left := (at < ends - length).nonzero()[:, 0]):
        drafted = drafter(truth[left].clone(), at[left].clone(), features[left], length)
        wanted = window(truth[left], at[left], length)
        accepted = (drafted == wanted).long().cumprod(1).sum(1)
        at[left] += accepted + 1
        num_tokens += int(accepted.sum()) + len(left)
        num_steps += len(left)
    return num_tokens / max(1, num_steps)


def samples(speaker: Speaker) -> str:
    """What it says to questions and beginnings, as Markdown."""
    parts = []
    for question, answer in zip(QUESTIONS, speaker.answers(QUESTIONS, LONGEST_STORY), strict=True):
        parts.append(f"**{question}**\n\n{answer}\n")
    for start, text in zip(BEGINNINGS, speaker.texts([BEGIN + start for start in BEGINNINGS], 64), strict=True):
        parts.append(f"*{start}*{text}\n")
    return "\n".join(parts)


def table(found: dict[str, float], drafts: dict[str, dict[str, float]]) -> str:
    """For the docs."""
    lines = ["| measured on the held-out part | |", "|---|---|"]
    lines += [f"| {name} | {value:.3f} |" if "perplexity" in name else f"| {name} | {value:.1%} |" for name, value in found.items()]
    lines += ["", "| tokens for each verification step | chain of 1 | 2 | 3 | 4 |", "|---|---|---|---|---|"]
    lines += [f"| {name} | " + " | ".join(f"{value:.2f}" for value in chains.values()) + " |" for name, chains in drafts.items()]
    return "\n".join(lines) + "\n"


def trained(training: dict[str, Any]) -> str:
    """How it was trained, in a sentence each."""
    lines = [
        f"{name}: {part['steps']:,} steps, {part['tokens'] / 1e6:.1f} million tokens, "
        f"{part['seconds']:,.0f} s on {part['device']}, torch {part['torch']}."
        for name, part in training.items()
    ]
    pictures = "\n![Losses over the steps](tiny-model/loss.svg)\n"
    return "\n" + "  \n".join(lines) + "\n" + pictures + "\n[Samples](tiny-model/samples.md)\n"


def sizes(shapes: dict[str, Shape]) -> str:
    """What the three are, for the docs."""
    rows = {
        "parameters": [f"{count_parameters(shape, name):,}" for name, shape in shapes.items()],
        "layers, width, feed-forward": [f"{shape.layers}, {shape.hidden}, {shape.inner}" for shape in shapes.values()],
        "heads, KV heads, head dim": [f"{shape.heads}, {shape.kv_heads}, {shape.head_dim}" for shape in shapes.values()],
        "longest context": [f"{shape.positions:,}" for shape in shapes.values()],
        "trained on": ["the next token", "the target's distributions", "the target's distributions and features"],
    }
    rows["parameters"][-1] += ", and the target's embedding"
    lines = ["| | " + " | ".join(shapes) + " |", "|---" * (len(shapes) + 1) + "|"]
    return "\n".join(lines + [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()]) + "\n"


def count_parameters(shape: Shape, name: str) -> int:
    return num_parameters(Eagle(shape) if name == "EAGLE head" else Llama(shape))
