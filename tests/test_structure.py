"""Packages import downwards only, as docs/structure.md says; late imports are asked too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import heavylift

PACKAGE = Path(heavylift.__file__).parent
ROOT = PACKAGE.parent
FREE = ("__init__", "__main__", "compat")
"""The package's own two files, which hand on names and the command; and what may import anything."""
UPWARDS = {("launch/entry.py", "api"), ("launch/entry.py", "compat")}
"""What looks up on purpose, inside a function."""


def places() -> dict[str, int]:
    """Package or module -> how high it stands, as the sentence of docs/structure.md has it."""
    text = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    sentence = text[text.index("Packages import downwards only:") : text.index("; those of one place")]
    steps = [re.findall(r"`(\w+)`", step) for step in reversed(sentence.split("→"))]
    return {name: place for place, names in enumerate(steps) for name in names}


def imports() -> Iterator[tuple[str, str, str, bool]]:
    """(file, its package, the package that it imports, whether at the top of the module)."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE)
        package = file.parts[0].removesuffix(".py")
        if package in FREE:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        at_top = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}:{node.lineno}: a relative import"
                modules = [f"{node.module}.{one.name}" for one in node.names]
            elif isinstance(node, ast.Import):
                modules = [one.name for one in node.names]
            for parts in (module.split(".") for module in modules):
                if parts[0] == "heavylift" and len(parts) > 1 and parts[1] != package:
                    yield str(file), package, parts[1], id(node) in at_top


def test_packages_import_downwards_only() -> None:
    place = places()
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert names - set(FREE) == set(place), "docs/structure.md names every package, and no other"
    seen = list(imports())
    assert len(seen) > 300, "the sources were read"
    upwards = {(file, to, at_top) for file, of, to, at_top in seen if to in FREE or place[to] >= place[of]}
    assert upwards == {(file, to, False) for file, to in UPWARDS}
