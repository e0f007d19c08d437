"""From what the user calls a model to a folder of the Hugging Face layout, and its config.json."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from enginery.checkpoint.formats import check_folder, refuse_file
from enginery.contracts.model import CheckpointSpec
from enginery.errors import CheckpointError
from enginery.plugin.near import did_you_mean, known_names

if TYPE_CHECKING:
    from enginery.config.schema import EngineOptions
    from enginery.plugin.registry import Registry

_HUB_ID: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_WANTED: Final = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "tiktoken.model"]
_UNWANTED: Final = ["[!1]*/*", "1[!_]*/*", "consolidated*"]  # folders but 1_Pooling, which says how to embed
_WEIGHTS: Final = ["*.safetensors", "*.safetensors.index.json"]


def text_part(config: Mapping[str, object]) -> Mapping[str, object]:
    """What config.json says of the text model alone, where it stands beside one for images; else nothing."""
    return text if isinstance(text := config.get("text_config"), Mapping) else {}


def with_dtype(config: Mapping[str, object], folder: Path | None) -> dict[str, object]:
    """config.json with the `dtype` that it may leave out: that of its text model, else of most plain numbers in the files.

    folder: of the files; None: there are none.
    """
    parts = (config, text_part(config))
    dtype = next((part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key)), None)
    if dtype is None and folder is not None:
        from enginery.checkpoint.files import dtype_of_most  # with torch, which most need not wait for

        dtype = dtype_of_most(folder)
    return {**config, "dtype": dtype} if dtype else dict(config)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, with what hf_quant_config.json says of its weights; `architectures` is in it. Raises `CheckpointError`."""
    path = folder / "config.json"
    if not path.exists():
        check_folder(folder)
        raise CheckpointError(f"{folder} has no config.json; it must be a checkpoint folder of the Hugging Face layout")
    config = read_json(path)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(
            f'{path} does not name its architecture; it needs "architectures": ["..."], and has {architectures!r}'
        )
    made = read_json(folder / "hf_quant_config.json").get("quantization")  # ModelOpt's, in place of a quantization_config
    stated = {"quant_method": "modelopt", **made} if isinstance(made, dict) and made.get("quant_algo") else None
    return config if stated is None else {"quantization_config": stated} | config


def read_json(path: Path) -> dict[str, object]:
    """A JSON object of a checkpoint, empty if there is no such file. Raises `CheckpointError` that names the file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, error) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__} where a JSON object is needed; download the checkpoint again")
    return content


class _Added(msgspec.Struct):
    id: int
    content: str


def stated_eos_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """generation_config.json states one or several, else config.json, else its `text_config`. The tokenizer's own counts too."""
    said = (each.get("eos_token_id") for each in (read_json(folder / "generation_config.json"), config, text_part(config)))
    stated = next((each for each in said if each is not None), [])
    ids = stated if isinstance(stated, list) else [stated]
    if not all(isinstance(one, int) for one in ids):
        raise CheckpointError(f"eos_token_id of {folder} is {stated!r}, which must be a token id or a list of them")
    return frozenset(ids)


def end_of_sequence(folder: Path) -> frozenset[int]:
    """The id of a tokenizer's `eos_token`, without loading it; empty where the files do not say."""
    named = read_json(folder / "tokenizer_config.json").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    with contextlib.suppress(OSError, msgspec.MsgspecError):  # whoever loads it tells what is wrong
        parts = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=dict[str, msgspec.Raw])
        added = msgspec.json.decode(parts.get("added_tokens", b"[]"), type=list[_Added])
        return frozenset(token.id for token in added if token.content == text)
    return frozenset()


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """For a file of a checkpoint. One that is whole but not ours to read need not be fetched again."""
    why = error.strerror if isinstance(error, OSError) else f"{error}; download the checkpoint again"
    return CheckpointError(f"{path} cannot be read: {why}")


def find_folder(model: str, registry: Registry, *, revision: str | None = None, with_weights: bool = True) -> Path:
    """The folder of `model`: a path, the name of an installed checkpoint, or a Hugging Face id, which is downloaded.

    A path that exists comes first, then a checkpoint. revision: branch, tag or commit, of a Hugging Face id only. with_weights:
    download them too. HF_HUB_OFFLINE=1 keeps to what is in the cache. Raises `CheckpointError`.
    """
    if not model or model.encode(errors="ignore").decode() != model:
        raise CheckpointError(
            f"the name {model!r} is empty or not UTF-8; give a folder, an installed checkpoint or a Hugging Face id"
        )
    path = Path(os.path.expanduser(model))
    try:
        if path.is_dir():
            _refuse_revision(revision, f"{model} is a folder here")
            check_folder(path)
            return path
        is_file = path.exists()
    except OSError as error:  # in a folder that others own, or too long
        raise unreadable(path, error) from error
    if (offer := registry.checkpoint(model)) is not None:
        _refuse_revision(revision, f"{model} is an installed checkpoint")
        return Path(offer.spec.folder)
    if is_file:
        raise refuse_file(path)
    if _HUB_ID.fullmatch(model):
        return _download(model, revision, with_weights=with_weights)
    names = [offer.name for offer in registry.offers(CheckpointSpec)]
    raise CheckpointError(
        f"{model!r} is no folder, no installed checkpoint and no Hugging Face id (owner/name){did_you_mean(model, names) or '.'} "
        f"Installed checkpoints: {known_names(names)}."
    )


def _refuse_revision(revision: str | None, found: str) -> None:
    if revision is not None:
        raise CheckpointError(f"{found}, which has no revision {revision!r}; leave it out, or give a Hugging Face id")


def find_tokenizer_folder(asked: EngineOptions, registry: Registry, model_folder: Path) -> Path:
    """Where the tokenizer is: with the model, unless another is asked for. Raises `CheckpointError`."""
    if asked.tokenizer is not None:
        return find_folder(asked.tokenizer, registry, revision=asked.tokenizer_revision, with_weights=False)
    if asked.tokenizer_revision is not None:
        given = f"--tokenizer-revision {asked.tokenizer_revision} is given without --tokenizer"
        raise CheckpointError(f"{given}; the model's own tokenizer is of the model's --revision")
    return model_folder


def _download(hub_id: str, revision: str | None, *, with_weights: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    unwanted = _UNWANTED if with_weights else [*_UNWANTED, *_WEIGHTS]
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=_WANTED, ignore_patterns=unwanted))
    except errors.GatedRepoError as error:
        why = "it is gated; accept its terms on huggingface.co, then log in with `hf auth login` or set HF_TOKEN"
        raise CheckpointError(f"{hub_id} cannot be downloaded: {why}") from error
    except errors.RepositoryNotFoundError as error:
        why = "there is no such folder here and no such repository on huggingface.co, or it is private; check the name"
        raise CheckpointError(f"{hub_id}: {why}, and HF_TOKEN for a private one") from error
    except errors.LocalEntryNotFoundError as error:
        what = "it is not in the cache" if revision is None else f"its revision {revision} is not in the cache"
        why = f"there is no such folder, {what}, and huggingface.co cannot be reached or HF_HUB_OFFLINE is set"
        raise CheckpointError(f"{hub_id}: {why}; download it where there is a network, and give its folder") from error
    except errors.RevisionNotFoundError as error:
        advice = f"huggingface.co/{hub_id} lists them"
        raise CheckpointError(f"{hub_id} has no branch, tag or commit {revision!r}; {advice}") from error
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        raise CheckpointError(f"{hub_id} cannot be downloaded: {type(error).__name__}: {error}") from error
