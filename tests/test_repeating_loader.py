"""RepeatingLoader never ends, and every epoch has its own order where the loader is shuffled."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from heavylift.api.dataloader import EngineDataLoader
from heavylift.api.repeating_loader import RepeatingLoader
from heavylift.errors import UserError
from heavylift.ranks import Ranks


def epochs(loader: RepeatingLoader, num: int) -> list[list[int]]:
    return [
        [int(row) for batch in itertools.islice(loader, len(loader)) for row in torch.as_tensor(batch).flatten()]
        for _ in range(num)
    ]


def test_a_list_is_given_again_and_again() -> None:
    loader = RepeatingLoader([1, 2, 3])
    assert iter(loader) is loader
    assert [next(loader) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    assert (len(loader), loader.epoch) == (3, 2)


def distributed_loader() -> DataLoader[int]:
    data = list(range(32))
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=2, rank=0, seed=3))  # type: ignore[arg-type]


def test_each_epoch_of_a_distributed_sampler_has_its_own_order() -> None:
    first, second, third = epochs(RepeatingLoader(distributed_loader()), 3)
    assert len(first) == 16 and first != second != third != first
    plain = distributed_loader()
    assert isinstance(plain.sampler, DistributedSampler)
    plain.sampler.set_epoch(2)
    assert third == [int(row) for batch in plain for row in batch]


def test_a_resumed_run_begins_at_its_epoch() -> None:
    whole = epochs(RepeatingLoader(distributed_loader()), 3)
    resumed = RepeatingLoader(distributed_loader())
    next(resumed)
    resumed.set_epoch(1)
    assert epochs(resumed, 2) == whole[1:]


def test_the_engines_loader_keeps_its_own_epochs() -> None:
    ranks = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))

    def loader() -> EngineDataLoader:
        return EngineDataLoader(list(range(16)), 4, ranks)  # type: ignore[arg-type]

    plain = loader()
    expected = [[int(row) for batch in plain for row in batch] for _ in range(3)]
    assert epochs(RepeatingLoader(loader()), 3) == expected
    assert expected[0] != expected[1]
    resumed = RepeatingLoader(loader())
    resumed.set_epoch(2)
    assert epochs(resumed, 1) == expected[2:]


@pytest.mark.parametrize("empty", [[], iter([1])])
def test_an_empty_epoch_is_told(empty: object) -> None:
    loader = RepeatingLoader(empty)
    with pytest.raises(UserError, match="no batch in a whole epoch"):
        for _ in range(3):
            next(loader)
