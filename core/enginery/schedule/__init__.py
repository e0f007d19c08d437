"""Which requests run in the next step. Knows pages and tokens, no tensors."""
