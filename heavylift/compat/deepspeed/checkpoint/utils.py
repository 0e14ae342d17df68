"""Checkpoints."""

from heavylift.api.whole_state import clone_tensors_for_torch_save

__all__ = ["clone_tensors_for_torch_save"]
