"""What config.json says, of each family, without torch."""
