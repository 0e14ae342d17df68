"""The dataloader that `initialize` and `engine.deepspeed_io` make: this rank's micro-batches of a dataset.

Every pass over the data is shuffled anew, the same on all ranks; each rank gets its own rows. What wraps around at the
end, and what is dropped, is torch's DistributedSampler's doing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from heavylift.config.words import shown
from heavylift.errors import UserError
from heavylift.ranks import Ranks


def check_dataset(what: str, dataset: Any) -> None:
    """Raises UserError, which begins with `what`, for something that holds no rows."""
    has_rows = isinstance(dataset, IterableDataset) or (
        callable(getattr(dataset, "__getitem__", None)) and callable(getattr(dataset, "__len__", None))
    )
    if not has_rows or isinstance(dataset, str | bytes | dict):
        raise UserError(f"{what} should be a dataset (rows by index, and their number), got {shown(dataset)}")
    if not isinstance(dataset, IterableDataset) and len(dataset) == 0:
        raise UserError(f"{what} is empty; give a dataset with at least one row")


class EngineDataLoader:
    """Iterable any number of times; `next()` works on it too."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        ranks: Ranks,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        sampler: Sampler[Any] | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        shuffle: bool = True,
        pin_memory: bool = False,
        seed: int = 0,
    ) -> None:
        """`batch_size`: rows per rank. An iterable dataset deals out its own rows: each rank should see others."""
        if collate_fn is not None and not callable(collate_fn):
            raise UserError(f"collate_fn= should be a function of a list of rows, got {shown(collate_fn)}")
        self.batch_size = batch_size
        self.epoch = -1
        """Passes begun, less one: the seed of the next pass's order."""
        self.dataset = dataset
        self.data_sampler = sampler
        if sampler is None and not isinstance(dataset, IterableDataset):
            self.data_sampler = DistributedSampler(
                dataset, ranks.world_size, ranks.rank, shuffle=shuffle, seed=seed, drop_last=drop_last
            )
        self._loader = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self.data_sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            num_workers=num_workers,
            pin_memory=pin_memory and ranks.device.type == "cuda",
        )
        self._iterator: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Micro-batches of one pass on this rank."""
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """The order of the pass that begins next."""
        self.epoch = epoch - 1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        if isinstance(self.data_sampler, DistributedSampler):
            self.data_sampler.set_epoch(self.epoch)
        return iter(self._loader)

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = None
            raise
