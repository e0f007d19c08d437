"""From what the user calls a model to a folder and its config.json."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file

from enginery.checkpoint.files import scan_checkpoint
from enginery.checkpoint.folder import end_of_sequence, find_folder, find_tokenizer_folder, read_config, read_json, with_dtype
from enginery.config.schema import EngineOptions
from enginery.errors import CheckpointError
from enginery.plugin.registry import Registry
from enginery.worker.choice import find_checkpoint

CHECKPOINT = """
from pathlib import Path
from enginery.api import CheckpointSpec, hookimpl

@hookimpl
def register_checkpoints():
    return [CheckpointSpec(name="small", api=(2, 0), priority=1, folder=Path(__file__).parent, note="")]
"""


def test_a_folder_is_itself(site, tmp_path) -> None:
    (tmp_path / "config.json").touch()
    assert find_folder(str(tmp_path), Registry.load()) == tmp_path


def test_an_installed_checkpoint_is_found_by_its_name(site) -> None:
    site.install("weights", CHECKPOINT)
    registry = Registry.load()
    assert find_folder("small", registry) == site.path / "weights"
    with pytest.raises(CheckpointError, match=r"did you mean small\? Installed checkpoints: small."):
        find_folder("smal", registry)


def test_a_file_is_refused(site, tmp_path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        find_folder(str(tmp_path / "model.safetensors"), Registry.load())


@pytest.mark.parametrize("name", ["", "not-\udcff-utf8"])
def test_a_name_that_cannot_be_told_is_refused(name: str, tmp_path, monkeypatch) -> None:
    """A folder may have one that is not UTF-8, and no process could be told of it, nor a client."""
    monkeypatch.chdir(tmp_path)
    if name:
        Path(name).mkdir()
    with pytest.raises(CheckpointError, match=rf"the name {re.escape(ascii(name))} is empty or not UTF-8; give a folder"):
        find_folder(name, Registry.load())


@pytest.mark.parametrize("path", ["./nope", "../x", "nope/.hidden", "-/x"])
def test_a_path_that_is_not_there_is_taken_for_no_hub_id(site, path: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is no folder"):
        find_folder(path, Registry.load())


def test_what_may_not_be_looked_at_is_an_error_of_ours(site, tmp_path, monkeypatch) -> None:
    with pytest.raises(CheckpointError, match=r"^x+ cannot be read: File name too long$"):
        find_folder("x" * 300, Registry.load())
    with pytest.raises(CheckpointError, match="'~nobody-of-this-name/m' is no folder"):
        find_folder("~nobody-of-this-name/m", Registry.load())

    def denied(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(CheckpointError, match=f"^{tmp_path} cannot be read: Permission denied$"):
        find_folder(str(tmp_path), Registry.load())


def test_a_file_that_may_not_be_read_need_not_be_fetched_again(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"a.json cannot be read: .*; download the checkpoint again"):
        read_json(tmp_path / "a.json")

    def denied(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(CheckpointError, match=r"a.json cannot be read: Permission denied$"):
        read_json(tmp_path / "a.json")


def test_a_link_to_nothing_is_told_as_one(tmp_path) -> None:
    """As in a cache of which a part was deleted."""
    (tmp_path / "model.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(CheckpointError, match=r"model.safetensors is a link to ../blobs/gone, where nothing is"):
        scan_checkpoint(tmp_path)


def test_an_empty_name_is_refused(site) -> None:
    with pytest.raises(CheckpointError, match="empty"):
        find_folder("", Registry.load())


def test_a_hub_id_is_downloaded_without_what_is_not_needed(site, monkeypatch) -> None:
    asked = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **given: asked.update(given) or "there")
    assert find_folder("owner/name", Registry.load()) == Path("there")
    assert asked.pop("revision") is None
    kept = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "1_Pooling/config.json"]
    left = ["original/params.json", "onnx/model.safetensors", "consolidated.safetensors", "pytorch_model.bin", "1x/config.json"]
    assert list(filter_repo_objects([*kept, *left], **asked)) == kept


def test_of_a_tokenizer_s_repository_no_weights_are_downloaded(site, monkeypatch) -> None:
    asked = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **given: asked.update(name=name, **given) or "there")
    wanted = EngineOptions(tokenizer="owner/words", tokenizer_revision="v2")
    assert find_tokenizer_folder(wanted, Registry.load(), Path("model")) == Path("there")
    assert (asked.pop("name"), asked.pop("revision")) == ("owner/words", "v2")
    kept = [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "special_tokens_map.json",
        "tiktoken.model",
    ]
    left = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    assert list(filter_repo_objects([*kept, *left], **asked)) == kept


def test_without_a_tokenizer_of_its_own_it_is_the_model_s(site, tmp_path) -> None:
    registry = Registry.load()
    assert find_tokenizer_folder(EngineOptions(), registry, tmp_path) == tmp_path
    with pytest.raises(CheckpointError, match="v2 is given without --tokenizer"):
        find_tokenizer_folder(EngineOptions(tokenizer_revision="v2"), registry, tmp_path)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The hub's cache without a network: two revisions of owner/name."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    for name, commit in (("main", "a" * 40), ("v1", "b" * 40)):
        (repository / "refs" / name).write_text(commit)
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
    return repository / "snapshots"


@pytest.mark.parametrize(("revision", "commit"), [(None, "a"), ("main", "a"), ("v1", "b"), ("b" * 40, "b")])
def test_a_revision_of_a_hub_id_is_found_in_the_cache(site, cache, revision: str | None, commit: str) -> None:
    assert find_folder("owner/name", Registry.load(), revision=revision) == cache / (commit * 40)


def test_a_revision_that_is_not_there_is_named(site, cache) -> None:
    with pytest.raises(CheckpointError, match="its revision v2 is not in the cache"):
        find_folder("owner/name", Registry.load(), revision="v2")


def test_a_folder_and_an_installed_checkpoint_have_no_revision(site, tmp_path) -> None:
    site.install("weights", CHECKPOINT)
    for name, what in ((str(tmp_path), "a folder here"), ("small", "an installed checkpoint")):
        with pytest.raises(CheckpointError, match=f"is {what}, which has no revision 'v1'"):
            find_folder(name, Registry.load(), revision="v1")


def test_a_hub_id_that_cannot_be_had_offline_says_what_to_do(site, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"owner/name: .*HF_HUB_OFFLINE.*give its folder"):
        find_folder("owner/name", Registry.load())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read: .*; download the checkpoint again"),
        ("[" * 200_000, "cannot be read: .*; download the checkpoint again"),
        ("[]", "holds list where a JSON object is needed"),
        ("{}", "does not name its architecture"),
        ('{"architectures": []}', "and has \\[\\]"),
        ('{"architectures": "Llama"}', "and has 'Llama'"),
    ],
)
def test_a_config_that_cannot_be_used_is_named_with_its_file(tmp_path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*{message}"):
        read_config(tmp_path)


def test_a_config_is_read(tmp_path) -> None:
    config = {"architectures": ["A"], "x": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == config


@pytest.mark.parametrize("named", ["</s>", {"content": "</s>", "special": True}])
def test_the_tokenizer_s_own_token_ends_a_text_too(named: object, tmp_path) -> None:
    """A fine-tune often has it there alone: its config.json and generation_config.json are the base model's."""
    assert end_of_sequence(tmp_path) == frozenset()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    tokens = [{"id": 5, "content": "<s>", "special": True}, {"id": 7, "content": "</s>", "special": True}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens, "model": {"vocab": {"</s>": 7}}}))
    assert end_of_sequence(tmp_path) == {7}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "eos_token_id": [3]}))
    assert find_checkpoint(EngineOptions(model=str(tmp_path)), Registry.load(no_plugins=True)).eos_token_ids == {3, 7}
    for damaged in ("{", "[]", '{"added_tokens": 3}', "{}"):
        (tmp_path / "tokenizer.json").write_text(damaged)
        assert end_of_sequence(tmp_path) == frozenset()


TEXT = {"text_config": {"dtype": "bfloat16"}}


@pytest.mark.parametrize(
    ("config", "stored", "expected"),
    [
        ({"torch_dtype": "float16"} | TEXT, ["F32"], "float16"),
        (TEXT, ["F32"], "bfloat16"),  # as in files of Qwen3.5
        ({"torch_dtype": None}, ["U8", "F32", "BF16", "BF16"], "bfloat16"),  # as those of gpt-oss, which say nothing
        ({}, ["U8"], None),
        ({}, [], None),
    ],
)
def test_a_config_without_a_dtype_gets_that_of_most_weights(tmp_path, config, stored: list[str], expected: str | None) -> None:
    kinds = {"U8": torch.zeros(64, dtype=torch.uint8), "F32": torch.zeros(8), "BF16": torch.zeros(7, dtype=torch.bfloat16)}
    if stored:
        save_file({f"{place}": kinds[kind].clone() for place, kind in enumerate(stored)}, tmp_path / "model.safetensors")
    assert with_dtype(config, tmp_path).get("dtype") == expected
    assert with_dtype({}, None) == {}


@pytest.mark.parametrize(
    ("config", "load_format", "expected"),
    [
        ({}, "auto", ("bfloat16", "most weights")),
        ({}, "dummy", (None, "config.json")),
        ({"torch_dtype": "float16"}, "auto", ("float16", "config.json")),
        ({"text_config": {"dtype": "float16"}}, "auto", ("float16", "config.json")),
    ],
)
def test_a_checkpoint_is_found_with_its_dtype_and_with_what_says_it(
    site, tmp_path, config: dict[str, object], load_format: str, expected: tuple[str | None, str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"]} | config))
    save_file({"w": torch.zeros(1, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    found = find_checkpoint(EngineOptions(model=str(tmp_path), load_format=load_format), Registry.load())
    assert (found.config.get("dtype"), found.dtype_from) == expected


def _tie(
    config: dict[str, object], tmp_path: Path, *, same_values: bool, same_file: bool = True, copy: str | None = None
) -> Mapping[str, Any]:
    """Of a checkpoint with an embedding and a head. copy: the name of another of the head."""
    embedding = torch.arange(4 << 20).view(-1, 2)  # more than is compared at once
    head = embedding.clone()
    head[-1, -1] += not same_values
    files = [{"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(2)}, {"lm_head.weight": head}]
    files[1] |= {} if copy is None else {copy: head.clone()}
    if same_file:
        save_file(files[0] | files[1], tmp_path / "model.safetensors")
    else:
        for place, tensors in enumerate(files):
            save_file(tensors, tmp_path / f"{place}.safetensors")
        weight_map = {name: f"{place}.safetensors" for place, tensors in enumerate(files) for name in tensors}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"]} | config))
    return find_checkpoint(EngineOptions(model=str(tmp_path)), Registry.load(no_plugins=True)).config


TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize("same_file", [True, False])
def test_a_stored_head_that_is_not_the_embedding_is_the_head_though_config_json_ties_them(
    site, tmp_path, caplog, same_file
) -> None:
    """As in transformers, which warns and ties nothing."""
    assert _tie(TIED, tmp_path, same_values=False, same_file=same_file)["tie_word_embeddings"] is False
    (told,) = caplog.messages
    assert re.fullmatch(
        r"lm_head\.weight in .*\.safetensors is not the embedding, though config.json ties them; it is the head", told
    )


@pytest.mark.parametrize("config", [{"text_config": TIED}, TIED | {"text_config": {"tie_word_embeddings": False}}])
def test_so_it_is_where_the_text_alone_is_tied_or_only_what_is_around_it(site, tmp_path, config: dict[str, object]) -> None:
    found = _tie(config, tmp_path, same_values=False)
    assert (found["tie_word_embeddings"], found["text_config"]["tie_word_embeddings"]) == (False, False)


def test_a_copy_of_the_head_is_not_the_embedding(site, tmp_path) -> None:
    """Layers behind the last, which predict further tokens, are stored with one."""
    copy = "model.layers.2.shared_head.head.weight"
    assert _tie(TIED, tmp_path, same_values=False, copy=copy)["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("config", "same_values", "expected"),
    [
        (TIED, True, True),
        ({}, True, None),
        ({}, False, False),
        ({"tie_word_embeddings": False}, True, False),
        ({"tie_word_embeddings": False, "text_config": TIED}, False, False),  # what is said around the text counts
    ],
)
def test_a_stored_head_is_not_told_of_where_nothing_is_wrong(
    site, tmp_path, caplog, config: dict[str, object], same_values: bool, expected: bool | None
) -> None:
    """Families that say nothing in config.json are tied or not, each by its default; a head of its own is the head anyhow."""
    assert _tie(config, tmp_path, same_values=same_values).get("tie_word_embeddings") is expected
    assert caplog.messages == []
