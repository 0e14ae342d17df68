"""Dataloaders."""

from heavylift.api.dataloader import EngineDataLoader as DeepSpeedDataLoader
from heavylift.api.repeating_loader import RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
