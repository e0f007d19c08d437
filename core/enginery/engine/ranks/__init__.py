"""The processes of an engine of several ranks: how they are started, told what to run, watched, and ended."""
