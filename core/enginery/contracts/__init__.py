"""What the core and its plugins agree on: protocols and frozen dataclasses. Imports torch for type checking only."""
