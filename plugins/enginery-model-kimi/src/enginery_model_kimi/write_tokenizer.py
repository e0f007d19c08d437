"""Makes a tokenizer.json of Kimi's tiktoken.model: `python -m enginery_model_kimi.write_tokenizer FOLDER`.

Kimi's repositories on the hub (Kimi-Linear, Kimi-K2, Moonlight) list tokens by rank, and have code that cuts text into words. What
transformers makes of such a file cuts it as Llama 3's does: other tokens than the model was trained on.
"""

from __future__ import annotations

import base64
import binascii
import json
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from enginery.api import CheckpointError

_ENDING: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (rf"[{kind}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kind in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
WORDS: Final = "|".join(  # tokenization_kimi.py
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def write_tokenizer(folder: Path) -> Path:
    """Write it beside the tiktoken.model in `folder`, with the named tokens of tokenizer_config.json. Raises `CheckpointError`."""
    ranks = _read_ranks(folder / "tiktoken.model")
    named = _read_named(folder / "tokenizer_config.json")
    letters = _letters()
    vocab = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    for number in range(len(ranks), max(named, default=-1) + 1):
        vocab[named[number].content if number in named else f"<|reserved_token_{number}|>"] = number
    merges = [("".join(letters[byte] for byte in left), "".join(letters[byte] for byte in right)) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([named[number] for number in sorted(named)])
    for number, token in named.items():
        if tokenizer.token_to_id(token.content) != number:
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'} calls token {number} {token.content!r}, and either another token too, or a "
                "token of tiktoken.model has that number; fetch both again"
            )
    path = folder / "tokenizer.json"
    try:
        tokenizer.save(str(path))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise CheckpointError(f"{path} cannot be written: {error}; make its folder writable, or copy it first") from error
    return path


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Tokens by rank: on each line one in base64, and its rank."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError, binascii.Error) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; fetch it again") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{path} has {len(ranks)} tokens, whose ranks are not 0 to {len(ranks) - 1}; fetch it again")
    return ranks


def _read_named(path: Path) -> dict[int, AddedToken]:
    """What `added_tokens_decoder` has, by id: marks of messages, of calls and the like."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
        return {
            int(number): AddedToken(token["content"], special=bool(token.get("special")), normalized=False)
            for number, token in listed.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}; fetch it again") from error


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The two that each token is made of by tokens of lower rank, in the order of ranks. One that is not made so has none."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[place : place + 1] for place in range(len(token))]
        while len(parts) > 2:
            lowest, place = min((ranks.get(pair[0] + pair[1], rank), place) for place, pair in enumerate(pairwise(parts)))
            if lowest >= rank:
                break
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def _letters() -> list[str]:
    """What byte-level tokenizers spell each byte as (GPT-2): itself where it can be seen, else a letter behind all bytes."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(0x100)]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m enginery_model_kimi.write_tokenizer FOLDER, with a tiktoken.model and a tokenizer_config.json")
    try:
        sys.stdout.write(f"{write_tokenizer(Path(sys.argv[1]))}\n")
    except CheckpointError as error:
        sys.exit(str(error))
