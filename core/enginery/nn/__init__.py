"""Layers that model plugins are built from. This package and `enginery.memory` are for a plugin's heavy module only."""
