"""The device."""

from heavylift.api.accelerator import get_accelerator, is_current_accelerator_supported

__all__ = ["get_accelerator", "is_current_accelerator_supported"]
