"""The tokenizer: byte-level BPE learnt from generated text, digits apart, with the tokens of the chat template."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tiny.corpus import BEGIN, DONE, END, TURN, documents

VOCABULARY: Final = 4096
SPECIAL: Final = (BEGIN, END, TURN, DONE)
LONGEST: Final = 2048
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|done|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def train(*, seed: int = 0, num_documents: int = 60_000, vocabulary: int = VOCABULARY) -> Tokenizer:
    """Merges from so many training documents; any text can be encoded, whatever it is."""
    tokenizer = Tokenizer(models.BPE())
    # Each digit is a token: sums are done digit by digit.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(documents(f"{seed}/tokenizer"), num_documents), trainer)
    # A plain text begins as plain documents of the training text do. Of a conversation, the template writes this token.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": LONGEST,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
