"""The device."""

from heavylift.api.accelerator import get_accelerator, is_current_accelerator_supported

from . import abstract_accelerator, real_accelerator

__all__ = ["abstract_accelerator", "get_accelerator", "is_current_accelerator_supported", "real_accelerator"]
