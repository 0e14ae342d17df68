"""What saving and loading a checkpoint keep in memory beside the states: one of them at a time, whatever the format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_api.runs import Case, ds_config
from ranks.gather import whole
from ranks.pool import run_on_ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import heavylift
from heavylift.api import checkpoint, checkpoint_states, checkpoint_writer
from heavylift.api.checkpoint_states import saved_states
from heavylift.api.checkpoint_writer import Later, made
from heavylift.offload.access import ParamStates
from heavylift.offload.groups import local_tensor

WIDTH, LAYERS = 32, 6


class Watch:
    """How many of the tensors that `made` returned are in memory at the same time, and how many there were."""

    def __init__(self) -> None:
        self.most = self.number = 0
        self._alive: list[StorageWeakRef] = []

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        self._alive = [storage for storage in self._alive if not storage.expired()]
        self._alive.append(StorageWeakRef(tensor.untyped_storage()))
        self.number += 1
        self.most = max(self.most, len(self._alive))
        return tensor


@contextmanager
def watching(owner: Any, name: str) -> Iterator[Watch]:
    """Looks at every tensor that a function returns."""
    watch, real = Watch(), getattr(owner, name)

    def wrapped(*args: Any) -> torch.Tensor:
        return watch.seen(real(*args))

    setattr(owner, name, wrapped)
    try:
        yield watch
    finally:
        setattr(owner, name, real)


def make_engine(state_format: str, stage: int, seed: int = 3) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    config = ds_config(Case("", stage, "cpu", "bf16"), dist.get_world_size(), heavylift={"state_format": state_format})
    engine = heavylift.initialize(model=model, config=config)[0]
    rows = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.bfloat16).view(4, WIDTH)
    engine.backward(engine(rows).float().square().mean())
    engine.step()
    return engine


def saving_job(state_format: str, stage: int, folder: Path) -> tuple[int, int, dict[str, torch.Tensor]]:
    """The most states at a time, how many were written, and the masters."""
    engine = make_engine(state_format, stage)
    with watching(ParamStates, "read") as watch:
        engine.save_checkpoint(folder)
    trained = dict(engine.module.named_parameters())
    states = {key: whole(made(t)) for key, t in saved_states(engine.optimizer, trained).items()}
    engine.destroy()
    return watch.most, watch.number, states


@pytest.mark.parametrize(("state_format", "stage"), [("split", 3), ("bf16", 2), ("int8", 3), ("fp32", 1)])
def test_one_state_is_in_memory_while_it_is_written(state_format: str, stage: int, tmp_path: Path) -> None:
    results = run_on_ranks(2, saving_job, state_format, stage, tmp_path)
    assert [most for most, *_ in results] == [1, 1]
    per_rank = 3 * LAYERS
    assert sum(number for _, number, _ in results) == 2 * per_rank
    saved = {key: torch.empty_like(value) for key, value in results[0][2].items()}
    checkpoint.read_tensors(tmp_path / "global_step1", saved, alone=True)
    assert all(torch.equal(saved[key], value) for key, value in results[0][2].items())


def loading_job(state_format: str, folder: Path) -> tuple[int, int, bool]:
    """The most states at a time, how many were read, and whether they are the saved ones."""
    engine = make_engine(state_format, 3)
    trained = dict(engine.module.named_parameters())
    before = {key: made(t) for key, t in checkpoint_states.saved_states(engine.optimizer, trained).items()}
    engine.save_checkpoint(folder)
    other = make_engine(state_format, 3, seed=4)
    limit, checkpoint_states.READ_BYTES = checkpoint_states.READ_BYTES, 4 * WIDTH * WIDTH  # of one rank's half: two
    try:
        with watching(checkpoint_states, "as_param") as watch:
            other.load_checkpoint(folder)
    finally:
        checkpoint_states.READ_BYTES = limit
    trained = dict(other.module.named_parameters())
    after = {key: made(t) for key, t in checkpoint_states.saved_states(other.optimizer, trained).items()}
    same = all(torch.equal(local_tensor(before[key]), local_tensor(after[key])) for key in before)
    engine.destroy()
    other.destroy()
    return watch.most, watch.number, same and len(after) == len(before) == 3 * LAYERS


@pytest.mark.parametrize("state_format", ["split", "int8"])
def test_a_few_states_are_in_memory_while_they_are_read(state_format: str, tmp_path: Path) -> None:
    assert run_on_ranks(2, loading_job, state_format, tmp_path) == [(2, 3 * LAYERS, True)] * 2


def test_views_are_written_without_what_is_behind_them(tmp_path: Path) -> None:
    run_on_ranks(1, view_job, tmp_path)
    assert (tmp_path / "__0_0.distcp").stat().st_size < 10_000
    saved = {"view": torch.zeros(3), "later": torch.zeros(3)}
    checkpoint.read_tensors(tmp_path, saved, alone=True)
    assert saved["view"].tolist() == [5.0, 6.0, 7.0] and saved["later"].tolist() == [1.0, 2.0, 3.0]


def view_job(folder: Path) -> None:
    large = torch.arange(100_000.0)
    later = Later(torch.empty(3, device="meta"), lambda: large[1:4])
    checkpoint_writer.save(folder, {"view": large[5:8], "later": later})
