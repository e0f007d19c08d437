"""Settings: what was asked for (flags, environment, file), the plugins that it leaves in, and what was resolved, with reasons.

Nothing here looks at a device or reads a checkpoint.
"""
