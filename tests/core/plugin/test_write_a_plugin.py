"""docs/write-a-plugin.md, followed to the letter: its files are written, installed, listed, tested and used."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from enginery.plugin.checker import check
from enginery.plugin.hookspecs import EngineHooks

DOCS = Path(__file__).parents[3] / "docs"


def files_of(page: Path) -> dict[str, str]:
    """The blocks that follow a line with a path, by that path."""
    return dict(re.findall(r"^`([\w./-]+)`\n\n```\w+\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))


@pytest.fixture
def tutorial(site, tmp_path):
    """The tutorial's folder, installed on the site."""
    files = files_of(DOCS / "write-a-plugin.md")
    for path, text in files.items():
        target = tmp_path / "enginery-attn-loop" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    ((name, package),) = project["entry-points"]["enginery"].items()
    site.install(project["name"], name=name, version=project["version"], requires=project["dependencies"], value=package)
    for path, text in files.items():
        if path.startswith("src/"):
            (site.path / path.removeprefix("src/")).write_text(text)
    return tmp_path / "enginery-attn-loop"


def test_the_tutorial_has_all_the_files_it_draws(tutorial) -> None:
    drawn = {"pyproject.toml", "tests/test_loop.py", *(f"src/enginery_attn_loop/{n}.py" for n in ("__init__", "spec", "backend"))}
    assert {path.relative_to(tutorial).as_posix() for path in tutorial.rglob("*") if path.is_file()} == drawn


def test_list_backends_shows_the_tutorials_backend_without_torch(site, tutorial) -> None:
    code = "from enginery.cli.list_backends import list_backends\nlist_backends(as_json=True)\n"
    done = site.run(code + "import sys\nassert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["backends"]}
    assert (rows["loop"]["plugin"], rows["loop"]["distribution"], rows["loop"]["version"], rows["loop"]["status"]) == (
        "attn-loop",
        "enginery-attn-loop",
        "0.1.0",
        "loaded",
    )


def test_the_tutorials_own_tests_pass(site, tutorial) -> None:
    arguments = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tutorial), str(tutorial / "tests")]
    done = site.run(f"import sys, pytest\nsys.exit(pytest.main({arguments!r}))")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


GENERATE = """
from enginery import LLM, SamplingParams
from enginery.errors import PluginError
from enginery.plugin.registry import Registry
try:
    Registry.load().default_checkpoint()
except PluginError:
    raise SystemExit(77)
prompts, params = [[5, 6, 7], list(range(9, 40))], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
for options in ({"plugin_options": ("loop.float32_scores=true",)}, {"page_size": 4}):
    with LLM(attention_backend="loop", dtype="float32", **options) as llm:
        mine = [answer.token_ids for answer in llm.generate(prompts, params)]
        assert llm.facts.attn_backend.startswith("loop"), llm.facts
with LLM(dtype="float32", blocked_plugins=("attn-loop",)) as llm:
    others = [answer.token_ids for answer in llm.generate(prompts, params)]
assert mine == others, (mine, others)
"""


def test_the_tutorials_backend_generates_what_others_do(site, tutorial) -> None:
    done = site.run(GENERATE)
    if done.returncode == 77:
        pytest.skip("no installed plugin brings a model to generate with")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", re.findall(r"^```python\n(.*?)^```$", (DOCS / "hooks.md").read_text(), re.MULTILINE | re.DOTALL))
def test_the_manuals_examples_fit_the_hooks(site, block: str) -> None:
    site.install("example", block)
    module = __import__("example")
    assert check(module, EngineHooks) == []
    assert sys.modules["example"] is module
