"""Checkpoints."""

from heavylift.api.whole_state import clone_tensors_for_torch_save

from . import utils

__all__ = ["clone_tensors_for_torch_save", "utils"]
