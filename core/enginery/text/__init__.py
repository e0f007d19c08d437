"""Text to tokens and back: tokenizer, sandboxed chat template, incremental detokenizer. Imports no torch."""
