"""RepeatingLoader: an iterator over a dataloader that never ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from heavylift.api.dataloader import EngineDataLoader
from heavylift.errors import UserError


class RepeatingLoader:
    """Begins a new epoch whenever the loader is through.

    A `DistributedSampler` of a torch DataLoader is told the epoch, so that every epoch has its own order. Raises
    UserError where an epoch is empty.
    """

    def __init__(self, loader: Any) -> None:
        """`loader`: anything that can be iterated more than once."""
        self.loader = loader
        self.epoch = 0
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        """Batches of one epoch."""
        return len(self.loader)

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self.set_epoch(self.epoch + 1)
        try:
            return next(self._batches)
        except StopIteration:
            raise UserError(
                "RepeatingLoader: the loader gave no batch in a whole epoch; give a dataset with samples, or a loader "
                "that can be iterated again (not a generator)"
            ) from None

    def set_epoch(self, epoch: int) -> None:
        """Begins this epoch now, at its first batch."""
        self.epoch = epoch
        if isinstance(self.loader, EngineDataLoader):
            self.loader.set_epoch(epoch)
        elif isinstance(self.loader, DataLoader) and isinstance(self.loader.sampler, DistributedSampler):
            self.loader.sampler.set_epoch(epoch)
        self._batches = iter(self.loader)
