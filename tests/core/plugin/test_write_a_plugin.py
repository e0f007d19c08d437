"""docs/write-a-plugin.md, followed to the letter: its files are written, installed, listed, tested and used."""

from __future__ import annotations

import json
import re
import sys

import pytest
from core.plugin.tutorials import DOCS, drawn_in, files_of, install_page, own_tests

from enginery.errors import PluginError
from enginery.plugin.checker import check, hooks_of
from enginery.plugin.groups import GROUPS
from enginery.plugin.hookspecs import EngineHooks
from enginery.plugin.records import Status
from enginery.plugin.registry import Registry

PAGE = "write-a-plugin.md"
TEXT = (DOCS / PAGE).read_text()


@pytest.fixture
def tutorial(site, tmp_path):
    """The tutorial's folder, installed on the site."""
    return install_page(PAGE, site, tmp_path)


def blocks(language: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_page_has_all_the_files_it_draws() -> None:
    assert files_of(PAGE).keys() == drawn_in(PAGE)


def test_the_page_has_every_hook_and_every_descriptor() -> None:
    hooks = list(hooks_of(EngineHooks))
    descriptors = [group.descriptor.__name__ for group in GROUPS.values()]
    assert [name for name in hooks + descriptors if f"`{name}`" not in TEXT] == []


def test_the_page_has_every_status() -> None:
    assert [status for status in Status if f"`{status}`" not in TEXT] == []


def test_plugins_shows_it_without_torch(site, tutorial) -> None:
    done = site.run(
        "import sys\nfrom enginery.cli.main import main\ntry:\n    main(['plugins', '--json'])\n"
        "except SystemExit:\n    pass\nassert 'torch' not in sys.modules",
        is_fresh=True,
    )
    assert done.returncode == 0, done.stderr
    (row,) = (row for row in json.loads(done.stdout) if row["name"] == "policy-aging")
    assert (row["distribution"], row["version"], row["status"]) == ("enginery-policy-aging", "0.1.0", "loaded")
    assert row["offers"] == ["schedule-policy:aging"]


def test_its_own_test_passes(site, tutorial) -> None:
    done = site.run(own_tests(tutorial))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_engine_takes_its_policy_and_not_when_it_is_blocked(site, tutorial) -> None:
    assert Registry.load().schedule_policy("aging").distribution == "enginery-policy-aging"
    with pytest.raises(PluginError, match=r"policy-aging .* might offer it but is blocked"):
        Registry.load(blocked=("policy-aging",)).schedule_policy("aging")


GENERATE = """
import enginery_policy_aging as package
from enginery import LLM, SamplingParams
from enginery.errors import PluginError
from enginery.plugin.registry import Registry
try:
    Registry.load().default_checkpoint()
except PluginError:
    raise SystemExit(77)
asked, aging = [], package.aging
package.aging = lambda request: asked.append(request.num_tokens) or aging(request)
params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
with LLM(schedule_policy="aging", dtype="float32", max_batch_requests=1) as llm:
    answers = llm.generate([list(range(9, 40)), [5, 6, 7]], params)
assert [len(answer.token_ids) for answer in answers] == [2, 2], answers
assert set(asked) == {3, 31}, asked
"""


def test_it_orders_the_requests_of_an_engine(site, tutorial) -> None:
    done = site.run(GENERATE)
    if done.returncode == 77:
        pytest.skip("no installed plugin brings a model to generate with")
    assert done.returncode == 0, done.stderr


def test_the_slips_are_reported_as_the_page_says(site) -> None:
    (slips,) = (block for block in blocks("python") if "polices" in block)
    (report,) = (block for block in blocks("text") if "polices" in block)
    site.install("slips", slips)
    (record,) = (record for record in Registry.load().records if record.name == "slips")
    assert record.status is Status.BROKEN
    assert record.reason.partition("\n")[2] == report.rstrip("\n")


@pytest.mark.parametrize("block", blocks("python", (DOCS / "hooks.md").read_text()))
def test_the_manuals_examples_fit_the_hooks(site, block: str) -> None:
    site.install("example", block)
    module = __import__("example")
    assert check(module, EngineHooks) == []
    assert sys.modules["example"] is module
