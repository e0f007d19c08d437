"""Speculation: what becomes of drafts. Drafters are plugins; how a step runs is the worker's."""
