"""Nothing here unpickles, or runs code that it was sent: processes talk in msgpack, checkpoints are safetensors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "multiprocessing"}
ATTRIBUTES = {
    *("recv_pyobj", "send_pyobj"),  # pyzmq
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),  # torch.distributed
    *("send_object_list", "recv_object_list", "allow_pickle"),
}
CALLS = {"torch.load", "torch.save", "eval", "exec", "__import__"}

# "file: code": why it is harmless.
ALLOWED = {"core/enginery/plugin/checker.py: eval(annotation, scope)": "an annotation in a plugin that has been imported already"}


def pickle_offences(source: str) -> list[str]:
    """Every import, call or keyword in `source` that pickles or evaluates."""
    offences = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                bad = any(MODULES & set(alias.name.split(".")) for alias in node.names)
            case ast.ImportFrom():
                names = {*(node.module or "").split("."), *(alias.name for alias in node.names)}
                bad = bool(MODULES & names) or (node.module == "torch" and bool(names & {"load", "save"}))
            case ast.Attribute():
                bad = node.attr in ATTRIBUTES | MODULES
            case ast.keyword():
                bad = node.arg in ATTRIBUTES and ast.unparse(node.value) != "False"
            case ast.Call():
                bad = isinstance(node.func, ast.Name | ast.Attribute) and ast.unparse(node.func) in CALLS
            case _:
                continue
        if bad:
            offences.append(ast.unparse(node))
    return offences


def test_nothing_pickles() -> None:
    offences = []
    for path in sorted([*ROOT.glob("core/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]):
        offences += [f"{path.relative_to(ROOT)}: {text}" for text in pickle_offences(path.read_text())]
    unexpected = [text for text in offences if text not in ALLOWED]
    assert not unexpected, "\n".join(unexpected)
    assert set(ALLOWED) <= set(offences), "an exception is needed no longer; take it off the list"


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle\n",
        "from pickle import loads\n",
        "import torch.multiprocessing as mp\n",
        "from torch import multiprocessing\n",
        "from torch import load\n",
        "state = torch.load(path)\n",
        "message = socket.recv_pyobj()\n",
        "dist.broadcast_object_list(values)\n",
        "numpy.load(path, allow_pickle=True)\n",
        "x = eval(text)\n",
        "exec(text)\n",
    ],
)
def test_pickling_is_reported(bad: str) -> None:
    assert pickle_offences(bad)


def test_what_only_looks_like_it_is_not_reported() -> None:
    assert pickle_offences("model.eval()\ntokens = file.load()\nnumpy.load(path, allow_pickle=False)\n'pickle'\n") == []
