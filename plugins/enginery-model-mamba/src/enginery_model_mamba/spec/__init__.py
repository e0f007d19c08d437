"""A module for each kind of family: what its config.json says, and its layers from the blocks beside this folder."""
