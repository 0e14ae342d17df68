"""Units that messages and reports are in."""

from __future__ import annotations

GIB = 2**30
"""Bytes."""
