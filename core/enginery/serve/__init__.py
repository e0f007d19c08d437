"""The HTTP front and its link to the engine process. Imports no torch."""
