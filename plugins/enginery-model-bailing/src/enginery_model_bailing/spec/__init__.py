"""A module for each family: what its config.json says."""
