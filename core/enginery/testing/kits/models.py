"""The kit for model families: a checkpoint's numbers against transformers, and the same whichever way a prompt is computed.

What is compared are log-probabilities of the prompts' own tokens, which need every layer, every position and the head. In float32
they are within `FLOAT32` nats of transformers'; in bfloat16 as far from its float32 ones as its own bfloat16, times `BFLOAT16`.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import torch

from enginery.checkpoint.folder import read_config
from enginery.contracts.request import SamplingParams
from enginery.errors import Unsupported
from enginery.llm.llm import LLM
from enginery.plugin.registry import Registry
from enginery.testing.kits.checks import KitCheck
from enginery.testing.kits.model_ranks import lanes, pipeline_stages, tensor_ranks
from enginery.testing.rules import BrokenRule, Fault, SkippedCheck

FLOAT32: Final = 2e-3
BFLOAT16: Final = 2.0
_LENGTHS: Final = (1, 7, 16, 33, 70)
_NUM_GREEDY: Final = 24
_BEHIND, _LONGEST_WINDOW = 20, 400  # tokens behind a window; the longest that prompts go beyond

Logprobs = list[list[float]]  # of each prompt, of its tokens from the second on


def _special_tokens(config: Mapping[str, object]) -> Iterator[int]:
    """Those that config.json has a use for, within its parts too."""
    for key, value in config.items():
        found = _special_tokens(value) if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
        if isinstance(value, Mapping) or re.search(r"token_(id|index)s?$", key):
            yield from (each for each in found if isinstance(each, int))


@dataclass(frozen=True, kw_only=True)
class ModelSubject:
    """A checkpoint folder, and where it is tried. options: further fields of `EngineOptions`."""

    folder: Path
    device: str = "cpu"
    options: dict[str, object] = field(default_factory=dict)

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """What config.json says, as it is read for every model."""
        return dict(read_config(self.folder))

    @functools.cached_property
    def prompts(self) -> list[list[int]]:
        """One of each length, and one longer than a short window, of any tokens but those that config.json has a use for."""
        facts = Registry.load().find_model(self.config)[0].spec.describe(self.config)  # config.json may have them in a part of it
        window, chosen = max((layer.sliding_window or 0 for layer in facts.layers), default=0), random.Random(0)
        lengths = (*_LENGTHS, window + _BEHIND) if _LENGTHS[-1] - _BEHIND < window <= _LONGEST_WINDOW else _LENGTHS
        usual = sorted({*range(facts.vocab_size)} - {*_special_tokens(self.config)})
        return [chosen.choices(usual, k=length) for length in lengths]

    def open(self, **changes: object) -> LLM:
        """An engine over the checkpoint, eager, in float32, without a prefix cache, but for what is asked for."""
        usual: dict[str, object] = {
            "device": self.device,
            "dtype": "float32",
            "num_pages": 64,
            "page_size": 16,
            "graphs": False,
            "prefix_cache": False,
            "max_batch_requests": 16,
        }
        return LLM(str(self.folder), **usual | self.options | changes)

    def logprobs(self, prompts: Sequence[Sequence[int]] | None = None, **changes: object) -> Logprobs:
        """By an engine that is asked for all prompts together."""
        with self.open(**changes) as llm:
            return prompt_logprobs(llm, self.prompts if prompts is None else prompts)

    @functools.cached_property
    def usual(self) -> Logprobs:
        """By an engine without anything special: what other ways are compared with."""
        return self.logprobs()


def prompt_logprobs(llm: LLM, prompts: Sequence[Sequence[int]]) -> Logprobs:
    """Log-probabilities of the prompts' tokens. Raises `BrokenRule` for one that is no number."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    answers = llm.generate([list(prompt) for prompt in prompts], params, progress=False)
    found = [[each.logprob for each in answer.prompt_logprobs or () if each is not None] for answer in answers]
    if any(math.isnan(value) for values in found for value in values):
        raise BrokenRule("log-probabilities are NaN", Fault.NAN)
    return found


def model_checks(subject: ModelSubject) -> list[KitCheck]:
    """The checks, the cheapest first. Raises `Unsupported` for a device that is not there."""
    if subject.device == "cuda" and not torch.cuda.is_available():
        raise Unsupported("there is no CUDA device here; leave --device out to try the model on the CPU")
    return [
        KitCheck(rule=rule, case=case, run=functools.partial(check, subject), needed=rule == "builds")
        for rule, case, check in (*_WAYS, *_REFERENCES, *_RANKS)
    ]


def _same(subject: ModelSubject, **changes: object) -> None:
    """The prompts computed in another way give the same."""
    compare(subject.logprobs(None, **changes), subject.usual, allowed=FLOAT32, what="against the usual way")


def _alone(subject: ModelSubject) -> None:
    with subject.open() as llm:
        alone = [prompt_logprobs(llm, [prompt])[0] for prompt in subject.prompts]
    compare(alone, subject.usual, allowed=FLOAT32, what="each prompt alone, against all in a batch")


def _prefix_hits(subject: ModelSubject) -> None:
    """Answers after a prefix that is cached are those after one that is computed."""
    prefix = subject.prompts[-1]
    asked = [[*prefix, *prompt] for prompt in subject.prompts[:3]]
    params = SamplingParams(max_tokens=_NUM_GREEDY, temperature=0.0, ignore_eos=True, logprobs=0)
    with subject.open() as llm:
        computed = llm.generate(asked, params, progress=False)
    with subject.open(prefix_cache=True) as llm:
        llm.generate([prefix], params, progress=False)
        hits = llm.generate(asked, params, progress=False)
    _same_answers(hits, computed, "after a cached prefix")


def _graphs(subject: ModelSubject) -> None:
    if subject.device != "cuda":
        raise SkippedCheck("graphs are captured on CUDA devices")
    params = SamplingParams(max_tokens=_NUM_GREEDY, temperature=0.0, ignore_eos=True, logprobs=0)
    with subject.open() as llm:
        eager = llm.generate(subject.prompts, params, progress=False)
    with subject.open(graphs=True) as llm:
        captured = llm.generate(subject.prompts, params, progress=False)
    _same_answers(captured, eager, "under graphs")


def _same_answers(got: Sequence[Any], wanted: Sequence[Any], what: str) -> None:
    """Greedy answers. Where the tokens part, both are asked how likely theirs was: a tie is no fault."""
    for index, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        pairs = zip(ours.token_ids, theirs.token_ids, ours.logprobs, theirs.logprobs, strict=True)
        for place, (our_token, their_token, our_logprob, their_logprob) in enumerate(pairs):
            gap = abs(our_logprob.logprob - their_logprob.logprob)
            if gap > FLOAT32:
                said = f"{what}: token {place} of answer {index} is {our_token} instead of {their_token}, {gap:.1e} nats apart"
                raise BrokenRule(said, Fault.NUMBERS)
            if our_token != their_token:
                break


def _parity(subject: ModelSubject) -> None:
    compare(subject.usual, _transformers(subject, "float32"), allowed=FLOAT32, what="against transformers in float32")


def _bfloat16(subject: ModelSubject) -> None:
    """The engine's distance to float32, relative to that of transformers' own bfloat16."""
    exact, rounded = _transformers(subject, "float32"), _transformers(subject, "bfloat16")
    ours = _distance(subject.logprobs(dtype="bfloat16"), exact)
    theirs = _distance(rounded, exact)
    if not ours <= BFLOAT16 * theirs + FLOAT32:
        said = f"{ours:.1e} nats from float32 on average, and transformers' own bfloat16 is {theirs:.1e}"
        raise BrokenRule(said, Fault.NUMBERS)


@functools.lru_cache(maxsize=4)
def _reference(folder: Path, dtype: str) -> Callable[[list[int]], torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model, loaded = cast(Any, AutoModelForCausalLM.from_pretrained(folder, dtype=vars(torch)[dtype], output_loading_info=True))
    if drawn := sorted(loaded["missing_keys"]):  # of another family, that of config.json's model_type
        raise ValueError(f"its {type(model).__name__} has {len(drawn)} tensors that the checkpoint lacks, as {drawn[0]}")

    @torch.no_grad()
    def logits(ids: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
        return found

    return logits


def _transformers(subject: ModelSubject, dtype: str) -> Logprobs:
    if importlib.util.find_spec("transformers") is None:
        raise SkippedCheck("transformers is not installed; pip install transformers gives numbers to compare with")
    if not list(subject.folder.glob("*.safetensors")):
        raise SkippedCheck("the folder has no weights, so there is nothing to compare")
    try:
        logits = _reference(subject.folder, dtype)
    except (ValueError, ImportError, OSError) as error:  # transformers does not know the family
        raise SkippedCheck(f"transformers cannot read it: {error}") from error
    found = []
    for prompt in subject.prompts:
        shares = logits(prompt).float().log_softmax(-1)
        found.append([float(shares[place, token]) for place, token in enumerate(prompt[1:])])
    return found


def compare(got: Logprobs, wanted: Logprobs, *, allowed: float, what: str) -> None:
    """Raises `BrokenRule` with the first prompt and place where they are farther apart than `allowed`, and the largest gap."""
    for index, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        if len(ours) != len(theirs):
            raise BrokenRule(f"{what}: prompt {index} has {len(ours)} log-probabilities instead of {len(theirs)}", Fault.UNWRITTEN)
        gaps = [abs(one - other) for one, other in zip(ours, theirs, strict=True)]
        if wrong := [place for place, gap in enumerate(gaps) if not gap <= allowed]:
            first, worst = wrong[0] + 1, max(gaps)
            said = f"{what}: prompt {index} of {len(ours) + 1} tokens is wrong from token {first} on, by up to {worst:.1e} nats"
            raise BrokenRule(f"{said}; allowed are {allowed:.1e}", Fault.NUMBERS)


def _distance(got: Logprobs, wanted: Logprobs) -> float:
    """On average, in nats."""
    gaps = [abs(a - b) for ours, theirs in zip(got, wanted, strict=True) for a, b in zip(ours, theirs, strict=True)]
    return sum(gaps) / max(len(gaps), 1)


ModelCheck = tuple[str, str, Callable[[ModelSubject], str | None]]

_WAYS: Final[tuple[ModelCheck, ...]] = (
    ("builds", "float32, every weight found", lambda subject: subject.open().close()),
    ("chunked", "prompts in chunks of 16", lambda subject: _same(subject, max_batch_tokens=16, max_batch_requests=4)),
    ("batches", "each prompt alone", _alone),
    ("pages", "pages of 1 token", lambda subject: _same(subject, page_size=1, num_pages=1024)),
    ("prefix-hits", "after a cached prefix", _prefix_hits),
    ("graphs", "decoding under graphs", _graphs),
)
_REFERENCES: Final[tuple[ModelCheck, ...]] = (
    ("parity", "transformers in float32", _parity),
    ("bfloat16", "transformers in bfloat16, by relative error", _bfloat16),
)
_RANKS: Final[tuple[ModelCheck, ...]] = (  # threads of this process, on the CPU
    (
        "tensor-ranks",
        "two tensor ranks, with whole experts too, and two to each KV head",
        lambda subject: tensor_ranks(subject.folder, subject.config, subject.prompts[2]),
    ),
    ("lanes", "two lanes", lambda subject: lanes(subject.folder, subject.config, subject.prompts[2])),
    ("pipeline-stages", "two stages", lambda subject: pipeline_stages(subject.folder, subject.config, subject.prompts[2])),
)
