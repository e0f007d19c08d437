"""docs/write-a-backend.md, followed to the letter: its files are written, installed, listed, tested and used."""

from __future__ import annotations

import json
import re

import pytest
from core.plugin.tutorials import DOCS, drawn_in, files_of, install_page, own_tests
from pairwise import EVERYTHING
from parity.oracle import FAMILIES

from enginery.plugin.registry import Registry
from enginery.testing.conformance import RULES, run_conformance
from enginery.testing.subject import Subject

PAGE = "write-a-backend.md"
BACKEND = "src/enginery_attn_loop/backend.py"
SPEC = "src/enginery_attn_loop/spec.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # small tensors: more threads cost time, most of all beside other tests


@pytest.fixture
def tutorial(site, tmp_path):
    """The tutorial's folder, installed on the site."""
    return install_page(PAGE, site, tmp_path)


def test_the_page_has_all_the_files_it_draws() -> None:
    assert files_of(PAGE).keys() == drawn_in(PAGE)


def test_the_whole_backend_has_at_most_150_lines() -> None:
    sources = [text for path, text in files_of(PAGE).items() if path.startswith("src/")]
    assert len(sources) == 3
    assert sum(text.count("\n") for text in sources) <= 150


def test_list_backends_shows_it_without_torch(site, tutorial) -> None:
    code = "from enginery.cli.list_backends import list_backends\nlist_backends(as_json=True)\n"
    done = site.run(code + "import sys\nassert 'torch' not in sys.modules", is_fresh=True)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["backends"]}
    assert (rows["loop"]["plugin"], rows["loop"]["distribution"], rows["loop"]["version"], rows["loop"]["status"]) == (
        "attn-loop",
        "enginery-attn-loop",
        "0.1.0",
        "loaded",
    )


def test_the_kit_is_green_on_it(site, tutorial) -> None:
    few = [] if EVERYTHING else ["-k", "float32"]  # its own test runs some of the others
    arguments = ["test-backend", "loop", "--json", "-o", "loop.float64=true", *few]
    done = site.run(f"from enginery.cli.main import main\nmain({arguments!r})", **ONE_THREAD)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    skipped = {row["rule"] for row in rows if row["outcome"] == "skipped"}
    assert skipped == {
        *("batch-invariance", "captured-equals-eager", "device-lengths", "mixed-captured"),
        *("states-after-verification", "states-amid-prompts", "trees-of-drafts"),
    }
    cases = " ".join(row["case"] for row in rows if row["rule"] == "numbers")
    assert all(word in cases for word in ("window", "softcap", "sinks", "bare latents", "absorbed", "one-shot", "chunked"))


def test_its_own_test_passes(site, tutorial) -> None:
    few = [] if EVERYTHING else ["-k", "not float32 and (numbers or hooks or refusals)"]
    done = site.run(own_tests(tutorial, *few), **ONE_THREAD)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(map(int, re.findall(r"(\d+) (?:passed|deselected)", done.stdout))) > 100


GENERATE = """
from enginery import LLM, SamplingParams
from enginery.errors import PluginError
from enginery.plugin.registry import Registry
try:
    Registry.load().default_checkpoint()
except PluginError:
    raise SystemExit(77)
prompts, params = [[5, 6, 7], list(range(9, 40))], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
for options in ({"plugin_options": ("loop.float64=true",)}, {"page_size": 4}):
    with LLM(attention_backend="loop", dtype="float32", **options) as llm:
        mine = [answer.token_ids for answer in llm.generate(prompts, params)]
        assert llm.facts.attn_backend.startswith("loop"), llm.facts
with LLM(dtype="float32", blocked_plugins=("attn-loop",)) as llm:
    others = [answer.token_ids for answer in llm.generate(prompts, params)]
assert mine == others, (mine, others)
"""


def test_it_generates_what_others_do(site, tutorial) -> None:
    done = site.run(GENERATE, **ONE_THREAD)
    if done.returncode == 77:
        pytest.skip("no installed plugin brings a model to generate with")
    assert done.returncode == 0, done.stderr


GENERATE_MLA = """
from enginery import LLM, SamplingParams
model, prompts, expected = {arguments!r}
params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
for strategy, tokens in (("absorbed", 1), ("one-shot", 96), ("chunked", 24)):
    options = dict(attention_backend="loop", mla_prefill=strategy, mla_chunk_tokens=tokens, max_batch_tokens=40)
    with LLM(model, dtype="float32", device="cpu", num_pages=200, **options) as llm:
        mine = [list(answer.token_ids) for answer in llm.generate(prompts, params)]
    assert mine == expected, (strategy, mine, expected)
"""


def test_it_generates_what_transformers_does_in_every_mla_strategy(site, tutorial, write_oracle) -> None:
    oracle = write_oracle("deepseek-v2-lite", FAMILIES["deepseek-v2-lite"])
    prompts = [prompt for prompt in oracle.prompts if len(prompt) in (1, 20, 64)]
    arguments = (str(oracle.folder), prompts, [oracle.continue_greedily(prompt, 8) for prompt in prompts])
    done = site.run(GENERATE_MLA.format(arguments=arguments), **ONE_THREAD)
    assert done.returncode == 0, done.stderr


def explained() -> list[tuple[str, str]]:
    """The page's table of messages: each rule and what is seen."""
    return re.findall(r"^\| `([\w-]+)` \| `([^`]+)` \|", (DOCS / PAGE).read_text(), re.MULTILINE)


# By what is seen, the mistake: in which file, what is replaced and by what.
SPANS = "        spans, key = self.spans(batch, torch."
MISTAKES = {
    "parameter 'forward_batch' is not in the hook's specification": [
        (BACKEND, "plan_forward_metadata(self, batch:", "plan_forward_metadata(self, forward_batch:")
    ],
    "capabilities say mla_ragged=False, and the backend has init_mha_chunk_metadata": [(SPEC, "        mla_ragged=True,\n", "")],
    "is always refused": [
        (SPEC, "Spec, Capabilities\n", "Spec, Capabilities, Reason\n"),
        (
            SPEC,
            "    options=",
            "    refuse_also=lambda needs: [Reason(rule='', text='')] * (needs.page_size == 1),\n    options=",
        ),
    ],
    "is off by": [(BACKEND, "distance >= window", "distance > window")],
    "but right in base e": [(SPEC, 'lse_base="e"', 'lse_base="2"')],
    "with no plan it raises AttributeError": [
        (BACKEND, "covering_plan(plan, batch, LoopPlan, backend=self.backend_id)", "plan"),
    ],
    "batch A after both were planned": [
        (BACKEND, SPANS, f"        self.slots = slots\n{SPANS}"),
        (BACKEND, "[planned.slots]", "[self.slots]"),
    ],
    "comes or goes when a batch is planned and attended": [(BACKEND, SPANS, f"        self.lens = lens\n{SPANS}")],
    "planning reads a tensor of the device": [(BACKEND, SPANS, f"        batch.positions.tolist()\n{SPANS}")],
    "Tensor.__bool__ is called in": [(BACKEND, "        for span in", "        assert q.isfinite().all()\n        for span in")],
}


def test_the_page_explains_these_mistakes() -> None:
    assert [seen for _, seen in explained()] == list(MISTAKES)


@pytest.mark.parametrize(("rule", "seen"), explained())
def test_a_mistake_gets_the_message_that_the_page_explains(site, tutorial, rule: str, seen: str) -> None:
    for path, old, new in MISTAKES[seen]:
        file = site.path / path.removeprefix("src/")
        text = file.read_text()
        assert text.count(old) == 1, f"{old!r} is not once in {path}"
        file.write_text(text.replace(old, new))
    rules = [each for each in RULES if each.name == rule]
    rows = run_conformance(Subject.installed("loop", Registry.load(), device="cpu"), rules=rules, stop_first=not EVERYTHING).rows
    messages = "\n".join(row.message for row in rows if row.outcome == "failed")
    assert messages.startswith(f"{rule}: ")
    assert seen in messages
