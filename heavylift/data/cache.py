"""Keeps tokenised data on disk, made once per machine however many processes ask for it at the same time.

One safetensors file per key. It is written under a temporary name and renamed, so it is whole or absent; `flock` on
a file beside it makes the first process work and the others wait for the result. No collectives: no time-outs.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from heavylift.data.report import DataReport
from heavylift.data.samples import SampleSet


def cached_samples(folder: Path, key: str, make: Callable[[], SampleSet]) -> SampleSet:
    """The samples stored under `key` in `folder`, else what `make` returns, which is then stored.

    A folder that cannot be written costs the cache, not the run: the report says so. Errors of `make` pass through
    and nothing is stored.
    """
    file = folder / f"{key}.safetensors"
    if (samples := _load(file)) is not None:
        return samples
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / f"{key}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        return _with_note(make(), folder, error)
    try:
        with _locked(lock):
            # another process may have made it while this one waited
            if (samples := _load(file)) is not None:
                return samples
            samples = make()
            try:
                _store(samples, file)
            except (OSError, SafetensorError) as error:
                return _with_note(samples, folder, error)
            return samples
    finally:
        os.close(lock)


@contextmanager
def _locked(lock: int) -> Iterator[None]:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        # a file system without locks: the work is done several times, the renames keep the file whole
        yield
        return
    try:
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)


def _load(file: Path) -> SampleSet | None:
    """The stored samples, or None where the file is missing or not one of ours (it will be replaced)."""
    try:
        with safe_open(file, framework="numpy") as stored:
            report = DataReport.from_json(stored.metadata()["report"])
            arrays = {name: stored.get_tensor(name) for name in ("tokens", "trained", "offsets")}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    return SampleSet(arrays["tokens"], arrays["trained"].astype(np.bool_), arrays["offsets"], report)


def _store(samples: SampleSet, file: Path) -> None:
    temporary = file.with_name(f".{file.stem}.{os.getpid()}.tmp")
    arrays = {"tokens": samples.tokens, "trained": samples.trained.astype(np.uint8), "offsets": samples.offsets}
    try:
        save_file(arrays, temporary, metadata={"report": samples.report.to_json()})
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _with_note(samples: SampleSet, folder: Path, error: Exception) -> SampleSet:
    reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    note = f"the tokens are not cached: {folder}: {reason}"
    return replace(samples, report=replace(samples.report, notes=(*samples.report.notes, note)))
