"""Which file of a checkpoint cannot be read: looked for only after reading has failed.

Left out: the small files, whose readers know their names (`heavylift.api.checkpoint`).
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_MOST_CHARS = 160


def short_reason(error: BaseException) -> str:
    """The first sentence of what torch says, on one line, without colours."""
    text = " ".join(_ESCAPES.sub("", str(error)).split()) or type(error).__name__
    sentence = re.split(r"(?<=[a-z)])\. ", text, maxsplit=1)[0].rstrip(".")
    return sentence if len(sentence) <= _MOST_CHARS else sentence[:_MOST_CHARS].rpartition(" ")[0] + " ..."


def find_cut(path: Path) -> str | None:
    """What is wrong with the first file of tensors in the checkpoint `path` that is missing or too short; else None."""
    for entry in _entries(path):
        file = path / entry.relative_path
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size < entry.offset + entry.length:
            return f"{file} is damaged: it is cut off at {file.stat().st_size} bytes"
    return None


def _entries(path: Path) -> list[_StorageInfo]:
    places = dcp.FileSystemReader(path).read_metadata().storage_data.values()
    return [place for place in places if isinstance(place, _StorageInfo)]


def find_damaged(path: Path) -> str | None:
    """What is wrong with the first bad file of tensors in the checkpoint `path`; None where each can be read.

    Files that are missing or too short are found by their sizes alone; only then all are read.
    """
    if (cut := find_cut(path)) is not None:
        return cut
    for entry in _entries(path):
        file = path / entry.relative_path
        try:
            with file.open("rb") as stream:
                stream.seek(entry.offset)
                torch.load(io.BytesIO(stream.read(entry.length)), map_location="cpu", weights_only=True)
        except OSError as error:
            return f"{file} cannot be read: {error.strerror or error}"
        except Exception:  # what a flipped bit does to a pickle is not foreseen
            return f"{file} is damaged"
    return None
