"""Plain words for the recipe's types and values, for error messages.

`expected(field)` says what a key takes ("a whole number ≥ 1 or auto"); `shown(value)` quotes what came, always short.
Everything is derived from `schema.py`, so a message cannot disagree with the check behind it.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from heavylift.config.schema import Recipe, Section

_MAX_SHOWN = 100  # characters; lists in lists, each of them short, add up to pages


def sections() -> dict[str, type[Section]]:
    """The sections of a recipe by name, in the order of the schema."""
    found: dict[str, type[Section]] = {}
    for name, field in Recipe.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, Section), (name, field.annotation)
        found[name] = field.annotation
    return found


def accepts(field: FieldInfo, kind: type) -> bool:
    """Whether `kind` (such as str, NoneType) stands in the field's annotation."""
    return any(part is kind for part in _alternatives(field.annotation))


def expected(field: FieldInfo) -> str:
    """What the key takes, e.g. `one of cosine, linear` or `a number from 0 to 1`."""
    parts = [part for part in _alternatives(field.annotation) if part is not NoneType]
    return " or ".join(_words(part, field.metadata) for part in parts)


def shown(value: Any) -> str:
    """The value as YAML users know it, at most 100 characters."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    short.maxlong = 30
    short.maxlist = short.maxtuple = 4
    try:
        text = short.repr(value)
        return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
    except ValueError:  # CPython refuses to print integers of more than 4300 digits
        return "a very large number"


def named(name: str) -> str:
    """A key as it was written, quoted and cut if it would not fit into one line of a message."""
    return name if name.isprintable() and len(name) <= 60 else shown(name)


def counted(number: int, noun: str) -> str:
    """`1 sample`, `2 samples`: for nouns whose plural has an s."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest to a mistyped one, or None."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def _alternatives(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, UnionType):
        return [one for part in get_args(annotation) for one in _alternatives(part)]
    return [annotation]


def _words(annotation: Any, metadata: list[Any]) -> str:
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        flat = [m for e in extra for m in (e.metadata if isinstance(e, FieldInfo) else [e])]
        return _words(inner, [*metadata, *flat])
    if get_origin(annotation) is Literal:
        return _one_of(str(value) for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        parts = get_args(annotation)
        if parts[1:] == (Ellipsis,):
            is_choice = get_origin(parts[0]) is Literal
            return f"a list of {_words(parts[0], []).removeprefix('one of ')}" if is_choice else "a list of texts"
        return f"a list of {len(parts)} values, each {_words(parts[0], [])}"
    if get_origin(annotation) is dict:
        return "a mapping"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _one_of(str(member.value) for member in annotation)
    plain = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
    assert annotation in plain, f"no words for {annotation}"
    return plain[annotation] + (_bounds(metadata) if annotation in (int, float) else "")


def _one_of(values: Iterable[str]) -> str:
    listed = list(values)
    return listed[0] if len(listed) == 1 else "one of " + ", ".join(listed)


def _bounds(metadata: list[Any]) -> str:
    limit = {key: getattr(m, key) for m in metadata for key in ("ge", "gt", "le", "lt") if hasattr(m, key)}
    if "ge" in limit and "le" in limit:
        return f" from {limit['ge']} to {limit['le']}"
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    said = [f"{signs[key]} {limit[key]}" for key in signs if key in limit]
    return " " + " and ".join(said) if said else ""
