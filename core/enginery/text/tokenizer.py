"""Text to token ids and back, by the files of a checkpoint: the same ids and the same text as transformers' fast tokenizers give.

Chat templates are in `template`, decoding of a growing output in `detokenize`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeGuard

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers

from enginery.checkpoint.folder import read_json, unreadable
from enginery.errors import CheckpointError, RequestError

NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ADDED_KEYS: Final = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
_CLEANED: Final = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m")),
    *((" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)
_BYTE: Final = re.compile("<0x([0-9A-Fa-f]{2})>")  # a token that spells a byte
_MANY: Final = 4096  # tokens, a millisecond of decoding
_KEPT: Final = 1 << 15  # tokens whose bytes are kept, some megabytes: to find them takes microseconds
_NO_TEXT: Final = "the text holds half a surrogate pair, which is no Unicode text"


class Tokenizer:
    """A checkpoint's tokenizer. Threads may share it.

    named: bos_token, eos_token and the like, as text. added_tokens: the texts of all that were added. special_ids: what
    `skip_special_tokens` leaves out. cleans_up: `decode` rewrites spaces before punctuation, so text is final at the end of an
    output only. num_chars_max: of the longest token. is_byte_fallback: characters outside the vocabulary are tokens of a byte each.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, named: Mapping[str, str], cleans_up: bool = False) -> None:
        self._backend = backend
        self.named = dict(named)
        self.cleans_up = cleans_up and type(backend.model).__name__ != "BPE"  # transformers leaves BPE alone
        self.special_ids = frozenset(number for number, token in backend.get_added_tokens_decoder().items() if token.special)
        self._added_ids = frozenset(backend.get_added_tokens_decoder())
        self.added_tokens = frozenset(token.content for token in backend.get_added_tokens_decoder().values())
        self.num_chars_max = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
        kinds = {part["type"]: part for part in decoder.get("decoders", [decoder]) if part}
        self.is_byte_fallback = "ByteFallback" in kinds
        self._byte_of = _byte_alphabet() if "ByteLevel" in kinds else None
        self._bytes_of = functools.lru_cache(_KEPT)(self._found_bytes)
        self._space = "▁" if kinds.keys() & {"Metaspace", "Replace"} else None

    @classmethod
    def from_folder(cls, folder: Path | str) -> Tokenizer:
        """Read tokenizer.json and the files beside it. Raises `CheckpointError` that names the file."""
        path = Path(folder) / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise _missing(path) from error
        except Exception as error:  # the tokenizers library raises plain Exception
            raise unreadable(path, error) from error
        config = read_json(path.with_name("tokenizer_config.json"))
        if "added_tokens_decoder" not in config:
            config |= read_json(path.with_name("special_tokens_map.json"))
        backend.no_truncation()
        backend.no_padding()
        is_llama = read_json(path.with_name("config.json")).get("model_type", "llama") == "llama"
        declared = str(config.get("tokenizer_class")).removesuffix("Fast") == "LlamaTokenizer"
        if declared and is_llama and "ByteLevel" not in repr(backend.decoder):
            _as_llama(backend, config)
        _add_tokens(backend, config)
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        named = {key: _content(value) for key, value in config.items() if key.endswith("_token") and _is_token(value)}
        return cls(backend, named=named, cleans_up=bool(config.get("clean_up_tokenization_spaces", False)))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. add_special_tokens: also those of the post-processor, such as the one that begins a text."""
        return list(self._encoded(text, add_special_tokens=add_special_tokens).ids)

    def count(self, text: str) -> int:
        """How many tokens `encode` gives without special ones, in less time and memory."""
        return len(self._encoded(text, add_special_tokens=False))

    def _encoded(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        """A batch of one, as the library lets other threads run only beside batches."""
        try:
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (TypeError, UnicodeError) as error:
            raise RequestError(_NO_TEXT, param="prompt") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `ids`; those that stand for no token are left out."""
        if len(ids) > _MANY:  # the library lets other threads run beside batches only; to give way for a few would take longer
            (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        else:
            text = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        for spaced, closed in _CLEANED if self.cleans_up else ():
            text = text.replace(spaced, closed)
        return text

    def is_token(self, token_id: int) -> bool:
        """Whether `token_id` stands for a token; models often have more ids than their tokenizer, and callers any number."""
        return 0 <= token_id < 1 << 32 and self._backend.id_to_token(token_id) is not None

    def is_byte(self, token_id: int) -> bool:
        """Whether `token_id` is one byte of a character that is spelt in bytes."""
        return self.is_byte_fallback and _BYTE.fullmatch(self._backend.id_to_token(token_id) or "") is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text, were it in the middle of it."""
        return self._bytes_of(token_id)

    def _found_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        if token_id in self._added_ids:
            return token.encode()
        if self._byte_of is not None and all(char in self._byte_of for char in token):
            return bytes(self._byte_of[char] for char in token)
        if self.is_byte_fallback and (byte := _BYTE.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return (token.replace(self._space, " ") if self._space else token).encode()

    def token_text(self, token_id: int) -> str:
        """One token for people; a part of a character is spelt `bytes:\\xe2`, as OpenAI does."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _missing(path: Path) -> CheckpointError:
    advice = "save one with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    if path.with_name("tiktoken.model").exists():  # which does not say how text is cut into words
        advice = "the README of the plugin that serves the model says how one is made of tiktoken.model"
    return CheckpointError(f"{path} is missing, and only that format is read; {advice}")


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, object]) -> None:
    """Add what tokenizer_config.json has and tokenizer.json has not, in transformers' order."""
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    wanted = [token for token in _listed(config) if repr(token) not in known]
    names = {token.content for token in (*backend.get_added_tokens_decoder().values(), *wanted)}
    for value in filter(_is_token, (*map(config.get, NAMED_TOKENS), *_extra(config))):
        if _content(value) not in names:
            names.add(_content(value))
            wanted.append(_added(value, special=True))
    if wanted:
        backend.add_tokens(wanted)


def _listed(config: Mapping[str, object]) -> list[AddedToken]:
    """The tokens of `added_tokens_decoder`, in the order of their ids."""
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise _malformed("added_tokens_decoder", listed)
    return [_added(listed[number]) for number in sorted(listed, key=int)]


def _extra(config: Mapping[str, object]) -> Iterable[object]:
    """Special tokens without a name of their own: a list, or by name in transformers 5."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    if not isinstance(extra, list | tuple | dict):
        raise _malformed("the list of special tokens", extra)
    return extra.values() if isinstance(extra, dict) else extra


def _malformed(what: str, found: object) -> CheckpointError:
    return CheckpointError(f"{what} in tokenizer_config.json is {found!r:.80}, which is no list of tokens; download the file again")


def _as_llama(backend: tokenizers.Tokenizer, config: Mapping[str, object]) -> None:
    """transformers 5 does not take these parts of such a checkpoint from tokenizer.json; they differ after special tokens."""
    prefixed = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy") else "first") if prefixed else "never"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(content=" ", left=1)] if prefixed else parts)


def _added(value: str | Mapping[str, object], **fixed: bool) -> AddedToken:
    given = {"content": value} if isinstance(value, str) else {key: value[key] for key in _ADDED_KEYS if key in value}
    return AddedToken(**(given | fixed))


def _is_token(value: object) -> TypeGuard[str | Mapping[str, object]]:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _content(value: str | Mapping[str, object]) -> str:
    return value if isinstance(value, str) else str(value["content"])


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}  # printable
    others = (byte for byte in range(256) if byte not in kept)
    return {chr(byte): byte for byte in kept} | {chr(256 + place): byte for place, byte in enumerate(others)}
