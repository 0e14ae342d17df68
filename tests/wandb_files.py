"""Reads back what an offline run of Weights & Biases wrote, for tests."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any


def wandb_records(path: Path) -> list[bytes]:
    """The records of a .wandb file: LevelDB's log format after a header of 7 bytes.

    Blocks of 32 KiB; a record is crc (4 bytes), length (2), kind (1: whole, 2 to 4: first, middle, last part), data.
    """
    data, position, found = path.read_bytes(), 7, []
    assert data[:4] == b":W&B", data[:7]
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        part = data[position + 7 : position + 7 + length]
        if kind in (1, 2):
            found.append(part)
        elif kind in (3, 4):
            found[-1] += part
        position += 7 + length
    return found


def _run_records(folder: Path) -> list[Any]:
    """The records of the one offline run below `folder`, which has ended."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    for _ in range(600):
        records = []
        for data in wandb_records(path):
            records.append(wandb_internal_pb2.Record())
            records[-1].ParseFromString(data)
        kinds = [record.WhichOneof("record_type") for record in records]
        if "exit" in kinds:  # wandb's own process writes, and may be behind
            break
        time.sleep(0.1)
    return records


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """The rows that were logged to the one offline run below `folder`."""
    history = [record.history.item for record in _run_records(folder) if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in history]


def wandb_exit_code(folder: Path) -> int:
    """With which the one offline run below `folder` ended; not 0: shown as failed."""
    (code,) = [r.exit.exit_code for r in _run_records(folder) if r.WhichOneof("record_type") == "exit"]
    return code
