"""Drafts in the worker: which drafter was chosen, and a model that guesses. What becomes of guesses is decided in `speculate`."""
