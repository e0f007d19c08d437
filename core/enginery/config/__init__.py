"""Settings: what was asked for (flags, environment, file) and what was resolved from it, with reasons."""
