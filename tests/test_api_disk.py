"""Disks that refuse while an engine writes: one line on every rank, nobody waits, and what was there stays."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from parity_api.models import MAKERS
from parity_api.runs import Case, ds_config
from parity_api.small import message_of
from ranks.pool import run_on_ranks

import heavylift
from heavylift.api import checkpoint, zero_to_fp32

WHOLE = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}


def make_engine() -> Any:
    case = Case("branches", 3, "cpu", "bf16", 1)
    config = ds_config(case, dist.get_world_size(), zero_optimization=WHOLE)
    return heavylift.initialize(model=MAKERS[case.model](), config=config)[0]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As on a disk that is full: writing more than this to a file fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.is_file()}


def full_disk_job(folder: Path) -> dict[str, str]:
    """Everything is written twice, the second time to a disk that rank 0 finds full."""
    engine = make_engine()
    calls: dict[str, Callable[[], Any]] = {
        "bin": lambda: engine.save_16bit_model(folder, "model.bin"),
        "safetensors": lambda: engine.save_16bit_model(folder, "model.safetensors"),
        "checkpoint": lambda: engine.save_checkpoint(folder, tag="last"),
    }
    for call in calls.values():
        call()
    dist.barrier()
    before = digests(folder), digests(folder / "last")
    said = {}
    for name, call in calls.items():
        with files_of_at_most(500 if dist.get_rank() == 0 else resource.RLIM_INFINITY):
            said[name] = message_of(call)
    assert engine.load_checkpoint(folder)[0] == str(folder / "last")
    assert (digests(folder), digests(folder / "last")) == before
    engine.destroy()
    return said


def test_a_full_disk_is_told_on_every_rank_and_costs_nothing(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, full_disk_job, tmp_path, timeout_s=100)
    for said in (first, second):
        for name, path in {"bin": "model.bin", "safetensors": "model.safetensors"}.items():
            assert said[name].startswith(f"{tmp_path / path}: cannot be written: "), said
            assert said[name].endswith("; free space, or choose another folder") and "\n" not in said[name]
        assert said["checkpoint"].startswith(f"checkpoint: {tmp_path / 'last'} cannot be written: "), said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "latest", "model.bin", "model.safetensors"]


def defect_job() -> str:
    def fail() -> None:
        raise ZeroDivisionError("in a scheduler's state_dict")

    try:
        checkpoint.on_first_rank(fail)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_no_rank_waits_for_a_defect_on_rank_0() -> None:
    first, second = run_on_ranks(2, defect_job, timeout_s=60)
    assert first == "ZeroDivisionError: in a scheduler's state_dict"
    assert second == "RuntimeError: rank 0 has failed: ZeroDivisionError: in a scheduler's state_dict"


def value_job() -> int:
    return checkpoint.on_first_rank(lambda: 10 + dist.get_rank())


def test_what_rank_0_found_is_known_to_all() -> None:
    assert run_on_ranks(2, value_job) == [10, 10]


def save_job(folder: Path) -> None:
    engine = make_engine()
    engine.save_checkpoint(folder)
    engine.destroy()


@pytest.mark.parametrize("safe", [False, True], ids=["bin", "safetensors"])
def test_converted_weights_are_all_new_or_all_old(
    safe: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_on_ranks(1, save_job, tmp_path / "saved")
    out = tmp_path / "out"
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", out, 400, safe)
    largest = max(path.stat().st_size for path in out.iterdir())
    before = digests(out)
    assert len(before) > 3
    assert [name for name in before if name.endswith(".index.json")]
    command = [
        str(tmp_path / "saved"),
        str(out),
        "--max_shard_size",
        "400",
        *(["--safe_serialization"] if safe else []),
    ]
    with files_of_at_most(largest - 1):
        assert zero_to_fp32.main(command) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {out}/") and ": cannot be written: " in told and told.count("\n") == 1
    assert digests(out) == before
    assert zero_to_fp32.main(command) == 0 and digests(out) == before
    # who opens the folder would take the single file, which is then of another time
    assert zero_to_fp32.main(command[:2] + command[4:]) == 2
    told = capsys.readouterr().err
    assert "is there already and belongs to weights in another number of files; remove those, or choose" in told
    assert digests(out) == before
    single = [command[0], str(tmp_path / "single"), *command[4:]]
    assert zero_to_fp32.main(single) == zero_to_fp32.main(single) == 0
    assert zero_to_fp32.main([*single, "--max_shard_size", "400"]) == 2
