"""Modules built on a device."""

from heavylift.api.on_device import OnDevice

__all__ = ["OnDevice"]
