"""Files that are whole or not there, whatever ends the program or the machine while they are written.

    with replacing(path) as part:      # a name beside `path`
        part.write_bytes(data)         # only once this is on the disk does it take the place of `path`

Left out: whole folders (`heavylift.api.checkpoint_folders`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
