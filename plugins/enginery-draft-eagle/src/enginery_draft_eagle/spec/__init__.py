"""What config.json says of each kind of head, without torch."""
