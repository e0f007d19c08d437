"""What trains the embedded model: texts, tokenizer, models, loops, evaluation. Not shipped in the wheel."""
