"""Several processes that run one model together: what they exchange, and what becomes of a step on those that do not sample."""
