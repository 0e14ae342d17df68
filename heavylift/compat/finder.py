"""The import hook behind `heavylift.compat.install`: finds `deepspeed`, its modules, and its package metadata."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "deepspeed"


class DeepSpeedFinder(DistributionFinder):
    """Finds `deepspeed` in `folder`, and as an installed distribution of `version`."""

    def __init__(self, folder: Path, version: str) -> None:
        self._folder = folder
        self._version = version

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The package, or a module of it. Raises ModuleNotFoundError for one that is not there, and says what is."""
        if fullname == PACKAGE:
            return importlib.util.spec_from_file_location(
                PACKAGE, self._folder / "__init__.py", submodule_search_locations=[str(self._folder)]
            )
        if not fullname.startswith(PACKAGE + ".") or path is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None:
            parent = fullname.rpartition(".")[0]
            there = sorted(_modules_in(Path(path[0])))
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: deepspeed is heavylift here, and {parent} has "
                f"{', '.join(there) if there else 'no modules'}; see docs/deepspeed_api.md",
                name=fullname,
            )
        return spec

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        """The distribution `deepspeed`."""
        name = None if context is None else context.name
        if name is not None and name.lower() == PACKAGE:
            yield _AsDeepSpeed(self._version, self._folder)


class _AsDeepSpeed(Distribution):
    """What `importlib.metadata` tells about `deepspeed`."""

    def __init__(self, version: str, folder: Path) -> None:
        self._version = version
        self._folder = folder

    def read_text(self, filename: str) -> str | None:
        """Its METADATA; there are no other files."""
        if filename != "METADATA":
            return None
        lines = ("Metadata-Version: 2.1", f"Name: {PACKAGE}", f"Version: {self._version}", "Summary: heavylift")
        return "\n".join(lines) + "\n"

    def locate_file(self, path: Any) -> Any:
        """Inside of the folder."""
        return self._folder / path


def _modules_in(folder: Path) -> Iterable[str]:
    for entry in folder.iterdir():
        if entry.suffix == ".py" and entry.stem != "__init__":
            yield entry.stem
        elif (entry / "__init__.py").exists():
            yield entry.name
