"""Keys of a recipe that do not go together, with what is wrong and which keys say so."""

from __future__ import annotations


class Conflict(ValueError):
    """Raised by the checks of `heavylift.config.schema`; `heavylift.config.recipe` says where the keys were given.

    The message stands behind any one of the keys, so it names those that it speaks of.
    """

    def __init__(self, message: str, *keys: str) -> None:
        """`keys`: all that the message concludes from, the most telling first; `key` in a section's check,
        `section.key` in one over several sections."""
        assert keys, f"a conflict is between keys: {message}"
        super().__init__(message)
        self.keys = keys
