"""The folder of a checkpoint, which takes the place of an older one of the same tag: at no moment is neither there.

    DIR/.TAG.saving      the new one while it is written; complete with `training.json`, which is written last
    DIR/.TAG.replaced    the older one, from when the new one is complete until that has its place

A save that is killed leaves these. `locate` finds the one that is complete and changes nothing; the next save (`begin`)
puts it into its place and removes the rest. Everything here is done by one process, between that of the others.

Left out: what the files hold (`heavylift.api.checkpoint`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from heavylift.errors import UserError
from heavylift.files import replacing, sync

TRAINING = "training.json"
EXTRAS = "extras.pt"
METADATA = ".metadata"
_SAVING, _REPLACED = ".saving", ".replaced"


def is_complete(path: Path) -> bool:
    """Whether all of a checkpoint is in this folder."""
    return (path / TRAINING).is_file()


def locate(folder: Path, tag: str) -> Path | None:
    """The checkpoint `tag` in `folder`: in its place, else where a save that was killed has left it. None: nowhere."""
    return next((path for path in _places(folder, PurePath(tag).parts) if is_complete(path)), None)


def _places(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    if not parts:
        yield folder
        return
    target = folder / parts[0]  # of a tag a/b the folder a may be a checkpoint too, and have been replaced
    for place in (target, _beside(target, _SAVING), _beside(target, _REPLACED)):
        yield from _places(place, parts[1:])


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}{suffix}")


def tags_in(folder: Path) -> list[str]:
    """Names of the checkpoints right in `folder`, sorted."""
    names = {path.parent.name for path in folder.glob(f"*/{TRAINING}")}
    targets = {target.name for target in _left_over(folder) if locate(folder, target.name)}
    return sorted({name for name in names if not is_left_over(name)} | targets)


def is_left_over(name: str) -> bool:
    """Whether a folder with this name is one of those that a save that was killed leaves."""
    return name.startswith(".") and name.endswith((_SAVING, _REPLACED))


def _left_over(folder: Path) -> list[Path]:
    """The targets of what saves that were killed have left in `folder`."""
    names = {path.name for path in folder.glob(".*/") if is_left_over(path.name)}
    return sorted(folder / PurePath(name).stem.removeprefix(".") for name in names)


# ---- saving -------------------------------------------------------------------------------------------------------


def saving_place(folder: Path, tag: str) -> Path:
    """Where the checkpoint `tag` is written before it has its place."""
    return _beside(folder / tag, _SAVING)


def begin(folder: Path, tag: str) -> None:
    """Makes the empty folder `saving_place`. What saves that were killed have left is cleared up first.

    Raises OSError; UserError where a file has the name.
    """
    parts = PurePath(tag).parts
    for depth in range(len(parts)):
        _clear_up(folder.joinpath(*parts[:depth]))
    target = folder / tag
    if target.exists() and not target.is_dir():
        raise UserError(f"{target}: expected a folder or nothing, got a file; choose another tag")
    saving_place(folder, tag).mkdir(parents=True)


def finish(folder: Path, tag: str, training: str, extras: bytes) -> None:
    """Adds the small files to what lies in `saving_place`, and puts it into its place. Raises OSError."""
    saving = saving_place(folder, tag)
    (saving / EXTRAS).write_bytes(extras)
    sync(saving / EXTRAS)
    sync(saving)  # the names of the tensors' files, before the one that says that they are there
    with replacing(saving / TRAINING) as part:
        part.write_text(training, encoding="utf-8")
    _put_into_place(saving, folder / tag)


def abandon(folder: Path, tag: str) -> None:
    """Removes what was written of a checkpoint that cannot be finished: a full disk is the likely reason."""
    saving = saving_place(folder, tag)
    if not is_complete(saving):
        shutil.rmtree(saving, ignore_errors=True)


def _put_into_place(saving: Path, target: Path) -> None:
    replaced = _beside(target, _REPLACED)
    if target.is_dir():
        os.replace(target, replaced)
    os.replace(saving, target)
    sync(target.parent)
    _discard(replaced, target)


def _clear_up(folder: Path) -> None:
    for target in _left_over(folder):
        saving, replaced = _beside(target, _SAVING), _beside(target, _REPLACED)
        kept = next((path for path in (target, saving, replaced) if is_complete(path)), None)
        if kept is None and replaced.is_dir() and not target.exists():
            kept = replaced  # not a checkpoint, but somebody's
        if kept in (saving, replaced):
            _discard(target, kept)  # a folder that was made anew meanwhile
            os.replace(kept, target)
        _remove(saving)
        _discard(replaced, target)


def _discard(older: Path, newer: Path) -> None:
    """Removes a folder; what is not the checkpoint's own (files that a script has put there, checkpoints of tags below
    it) goes over to the newer one."""
    if older.is_symlink():
        older.unlink()
        return
    for path in list(older.iterdir()) if older.is_dir() else ():
        ours = path.name in (TRAINING, EXTRAS, METADATA) or path.suffix == ".distcp"
        if not ours and not (newer / path.name).exists():
            os.replace(path, newer / path.name)
    _remove(older)


def _remove(path: Path) -> None:
    (path / TRAINING).unlink(missing_ok=True)  # first: what is half removed is not complete
    shutil.rmtree(path, ignore_errors=True)
