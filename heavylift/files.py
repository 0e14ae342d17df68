"""Files that are whole or not there, whatever ends the program or the machine while they are written.

    with replacing(path) as part:      # a name beside `path`
        part.write_bytes(data)         # only once this is on the disk does it take the place of `path`

And room on a disk, kept for what is to be written later. Left out: whole folders (`heavylift.api.checkpoint_folders`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

_NO_FOLDER_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EACCES)


def sync(path: Path) -> None:
    """Returns once what was written to the file, or the names in the folder, would survive a power cut.

    Raises OSError where the disk says that it could not write; nothing where a file system cannot do this for folders.
    """
    is_folder = path.is_dir()
    try:
        opened = os.open(path, os.O_RDONLY)
    except OSError as error:
        if is_folder and error.errno in _NO_FOLDER_SYNC:
            return
        raise
    try:
        os.fsync(opened)
    except OSError as error:
        if not (is_folder and error.errno in _NO_FOLDER_SYNC):
            raise
    finally:
        os.close(opened)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name in the folder of `path` to write to; it takes the place of `path` when the block ends without an
    exception, else it is removed, and `path` stays as it was. Links are followed. Raises OSError."""
    path = Path(os.path.realpath(path))
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        sync(part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


class Room:
    """Bytes of a disk that nobody else can take before `release`, or before this process ends, however it does.

    They belong to a file without a name. Where the file system cannot do that there is no such room; nor is there in
    a folder that lies in memory, which a training needs more.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """`folder` must be there."""
        self._file: IO[bytes] | None = None
        if _lies_in_memory(folder):
            return
        try:
            file = tempfile.TemporaryFile(dir=folder)
        except OSError:
            return
        # not os.posix_fallocate, which writes into every block where a file system lacks the call
        allocate = getattr(ctypes.CDLL(None), "fallocate", None)
        if allocate is None or allocate(file.fileno(), _KEEP_SIZE, ctypes.c_longlong(0), ctypes.c_longlong(num_bytes)):
            file.close()
            return
        self._file = file

    @property
    def num_bytes(self) -> int:
        """What is kept: 0 where nothing is."""
        return 0 if self._file is None else os.fstat(self._file.fileno()).st_blocks * 512

    def release(self) -> None:
        """Gives the room back. A second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None


_KEEP_SIZE = 1  # linux/falloc.h: blocks beyond the end of the file, which limits for files do not count


def _lies_in_memory(folder: Path) -> bool:
    real = Path(os.path.realpath(folder))
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    fstype = next((mounts[place] for place in (real, *real.parents) if place in mounts), "")
    return fstype in ("tmpfs", "ramfs")
