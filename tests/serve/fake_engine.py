"""An engine without a model: it repeats the prompt, token by token, and ends. Also runs as the engine's process.

Seeds make it misbehave: BREAK ends the process with a bug, FAIL gives the request up (for its grammar, if it has one), HELD repeats
the prompt and goes on when the file that FAKE_GO names is there, PLUGIN is refused by a plugin's bug, DRAFTED has three guesses
verified for each token, of which one is told, BY_SEVENS has up to seven tokens a step, and RIGHT guessed all of them but the last.
Without the file that FAKE_NEEDS names it does not start, and without that of FAKE_SLOW_WITHOUT slowly. While there is a file that
FAKE_PREPARES names, before the number of the replica, it is being prepared.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from enginery.config.schema import EngineOptions
from enginery.config.sources import served_names
from enginery.contracts.engine import BuildProgress, DraftCounts, EngineFacts, EngineStats, KernelState, ReportProgress
from enginery.contracts.request import FinishReason, GenerationRequest, RequestOutput, TokenLogprob
from enginery.errors import CheckpointError, PluginError, QueueFull, RequestError
from enginery.plugin.registry import Registry

COMMAND = (sys.executable, __file__)
PLUGIN, BREAK, FAIL, HELD, DRAFTED, BY_SEVENS, RIGHT = 600, 666, 667, 668, 669, 670, 671
VOCAB_SIZE = 600
EOS = 1


class FakeEngine:
    """Log lines `submit|abort|finish ID` go to the file that FAKE_LOG names."""

    def __init__(self, options: EngineOptions) -> None:
        self._requests: dict[str, tuple[GenerationRequest, int]] = {}
        self._aside: list[GenerationRequest] = []
        self._options = options
        self._log = os.environ.get("FAKE_LOG")
        self._go = Path(os.environ.get("FAKE_GO", "/nowhere"))
        self.facts = EngineFacts(
            model_name=(names := served_names(options, "fake"))[0],
            served_names=names,
            folder=str(options.model),
            max_model_len=options.max_model_len or 512,
            vocab_size=VOCAB_SIZE,
            dtype="float32",
            attn_backend="none",
            note="",
            num_pages=64,
            page_size=16,
            eos_token_ids=(EOS,),
            decisions=(("engine", "fake", "this is a test"),),
        )

    @classmethod
    def build(cls, options: EngineOptions, registry: Registry, report: ReportProgress) -> FakeEngine:
        report(BuildProgress(phase="weights", done_bytes=3 * 10**9, total_bytes=16 * 10**9))
        needed, quick = os.environ.get("FAKE_NEEDS"), os.environ.get("FAKE_SLOW_WITHOUT")
        if options.device == "broken" or (needed and not Path(needed).exists()):
            raise CheckpointError("the weights are gone; fetch them again")
        print(os.environ.get("FAKE_NOISE", ""), end="", file=sys.stderr, flush=True)
        time.sleep(600 if quick and not Path(quick).exists() else float(os.environ.get("FAKE_LOAD_S", "0")))
        return cls(options)

    def prepare(self) -> bool:
        while Path(f"{os.environ.get('FAKE_PREPARES', '/nowhere')}{self._options.dp_rank}").exists():
            time.sleep(0.01)
        return False

    @property
    def meter(self) -> FakeEngine:
        return self

    def stats(self) -> EngineStats:
        compiling = tuple(os.environ.get("FAKE_COMPILING", "").split())
        return EngineStats(
            num_running=len(self._requests),
            free_pages=64 - len(self._requests),
            attn_backend="first" if compiling else "fake",
            steps_by_backend={"first": 3, "fake": 4},
            kernels=KernelState(compiling=compiling, seconds=2.5),
            drafts=DraftCounts(verifications=4, told=11, drafted=20, accepted=8, by_position=(4, 3, 1)),
        )

    def profile(self, num_steps: int) -> str:
        return f"{num_steps}.json"

    def recover(self, error: Exception) -> list[RequestOutput]:
        raise error

    def flush_prefix_cache(self) -> int:
        return 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._aside)

    def submit(self, request: GenerationRequest) -> None:
        if len(self._requests) >= self._options.max_queued_requests:
            raise QueueFull(f"{len(self._requests)} requests are waiting, and no more may; try again")
        if request.params.seed == PLUGIN:
            raise PluginError("odd-policy could not give a request its place: ZeroDivisionError: division by zero")
        num_written = 0 if request.prompt_only else request.params.max_tokens
        if len(request.prompt_token_ids) + num_written > self.facts.max_model_len:
            raise RequestError("the prompt is too long", param="prompt")
        if request.params.grammar is not None:
            self._aside.append(request)
        else:
            self._requests[request.request_id] = (request, 0)
        self._say("submit", request.request_id)
        self._say("client", request.client)

    def abort(self, request_id: str) -> None:
        if self._requests.pop(request_id, None):
            self._say("abort", request_id)

    def step(self) -> list[RequestOutput]:
        aside, self._aside = self._aside, []
        answers = [self._answer(request) for request in aside]
        running = [(request, count) for request, count in self._requests.values() if not self._is_held(request, count)]
        time.sleep(0 if running else 0.005)
        return answers + [self._step(request, count) for request, count in running]

    def _is_held(self, request: GenerationRequest, count: int) -> bool:
        return request.params.seed == HELD and count >= len(request.prompt_token_ids) and not self._go.exists()

    def _answer(self, request: GenerationRequest) -> RequestOutput:
        """Of a request with a grammar, which is logged and has no effect; one with the word BAD or BUSY is refused."""
        grammar = request.params.grammar
        self._say("grammar", f"{grammar.kind}:{grammar.source}".replace(" ", ""))
        if "BAD" in grammar.source:
            return RequestOutput(request_id=request.request_id, error="the grammar is bad", param="grammar", is_answer=True)
        if "BUSY" in grammar.source:
            told = {"error": "the threads are busy", "param": "grammar", "is_overload": True}
            return RequestOutput(request_id=request.request_id, is_answer=True, **told)
        self._requests[request.request_id] = (request, 0)
        return RequestOutput(request_id=request.request_id, is_answer=True)

    def _step(self, request: GenerationRequest, count: int) -> RequestOutput:
        """A token, or up to seven."""
        parts = [self._next(request, count)]
        while request.params.seed in (BY_SEVENS, RIGHT) and len(parts) < 7 and not (parts[-1].finish_reason or parts[-1].error):
            parts.append(self._next(request, count + len(parts)))
        told = {"token_ids": sum((part.token_ids for part in parts), ()), "prompt_logprobs": parts[0].prompt_logprobs}
        if request.params.seed == RIGHT:
            told["num_drafted"] = told["num_accepted"] = len(parts) - 1
        if request.params.logprobs is not None:
            told["logprobs"] = sum((part.logprobs or () for part in parts), ())
        return msgspec.structs.replace(parts[-1], **told) if len(parts) > 1 else parts[0]

    def _next(self, request: GenerationRequest, count: int) -> RequestOutput:
        params, prompt = request.params, request.prompt_token_ids
        if params.seed == BREAK and count == 2:
            raise ZeroDivisionError("a bug of the engine")
        if params.seed == FAIL and count == 2:
            del self._requests[request.request_id]
            to_blame = None if params.grammar is None else "grammar"
            return RequestOutput(request_id=request.request_id, error="the logits were NaN", param=to_blame)
        ends = count == len(prompt) and not params.ignore_eos
        token = EOS if ends else prompt[count % len(prompt)]
        self._requests[request.request_id] = (request, count + 1)
        finish = FinishReason.STOP if ends else FinishReason.LENGTH if count + 1 == params.max_tokens else None
        if finish:
            del self._requests[request.request_id]
            self._say("finish", request.request_id)
        drafted = params.seed == DRAFTED and params.speculation
        first = count == 0 and params.prompt_logprobs is not None
        return RequestOutput(
            request_id=request.request_id,
            token_ids=(token,),
            logprobs=None if params.logprobs is None else (_logprob(token, params.logprobs),),
            prompt_logprobs=(None, *(_logprob(token, params.prompt_logprobs) for token in prompt[1:])) if first else None,
            finish_reason=finish,
            stop_token_id=EOS if ends else None,
            num_cached_tokens=len(prompt) // 2,
            num_drafted=3 * drafted,
            num_accepted=1 * drafted,
            embedding=tuple(float(token) for token in prompt[-2:]) if request.embed else None,
        )

    def _say(self, what: str, request_id: str) -> None:
        if self._log:
            with Path(self._log).open("a") as file:
                file.write(f"{what} {request_id}\n")


def _logprob(token: int, count: int) -> TokenLogprob:
    top = tuple(((token + place) % VOCAB_SIZE, -0.5 - place) for place in range(count))
    return TokenLogprob(token_id=token, logprob=-0.5, top=top)


if __name__ == "__main__":
    from enginery.serve.engine.process import run

    sys.exit(run(FakeEngine.build))
