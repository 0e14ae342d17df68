"""Where a ds_config comes from: a mapping, the path of a file, or urlsafe base64 of JSON.

Files may have `//`, `#` and `/* */` comments and trailing commas; what only Hjson allows (unquoted keys, ...) is read
through the `hjson` package where it is installed. Left out: what the keys mean.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heavylift.config.deepspeed.places import find_twice
from heavylift.config.words import named, shown
from heavylift.errors import UserError

EXTRA = "deepspeed"
"""The optional dependency that brings `hjson`."""

_TOKEN = re.compile(
    r"""
    (?P<string>"(?:[^"\\\n]|\\.)*")     # kept: a comment sign inside a string is text
    |(?P<comment>//[^\n]*|\#[^\n]*|/\*(?:(?!\*/).)*\*/)
    |(?P<comma>,)(?=(?:\s|//[^\n]*(?:\n|$)|\#[^\n]*(?:\n|$)|/\*(?:(?!\*/).)*\*/)*[}\]])
    """,
    re.VERBOSE | re.DOTALL,
)


class _Duplicate(ValueError):
    """A key that stands twice in one object."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{named(key)}: given twice in one block; remove one")


@dataclass(frozen=True)
class Source:
    """A ds_config, read."""

    values: dict[str, Any]
    name: str
    """For messages: the path; `ds_config` for mappings and base64."""
    text: str | None = None
    """The file's JSON without its comments, lines kept; None for Hjson and what is no file."""


def read_source(config: Mapping[str, Any] | str | Path) -> Source:
    """The raw mapping of a ds_config, and where it comes from.

    Raises UserError: missing or unreadable file, syntax errors with line and column, duplicate keys, not a mapping.
    """
    if isinstance(config, Mapping):
        return Source(dict(config), "ds_config")
    if isinstance(config, Path):
        return _read_file(config)
    if not isinstance(config, str):
        raise UserError(f"ds_config: expected a mapping, a path or base64 text, got {shown(config)}")
    # a base64 text may be longer than a file name may be
    try:
        is_file = os.path.exists(config)
    except ValueError:  # a NUL character
        is_file = False
    if is_file:
        return _read_file(Path(config))
    decoded = _decode(config)
    if decoded is None:
        raise UserError(
            f"{named(config)}: no such file, nor base64 of JSON; give the path of a ds_config.json, or the mapping"
        )
    return Source(parse_json(decoded, "ds_config (base64)"), "ds_config")


def _read_file(path: Path) -> Source:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the path of a ds_config.json") from None
    except IsADirectoryError:
        raise UserError(f"{path}: expected a ds_config.json, got a folder") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: expected UTF-8 text, got byte {error.object[error.start]:#04x}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    values, plain = _parse(text, str(path))
    return Source(values, str(path), plain)


def _decode(text: str) -> str | None:
    """JSON text out of urlsafe base64, or None where it is none."""
    try:
        decoded = base64.b64decode(text, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def parse_json(text: str, source: str) -> dict[str, Any]:
    """The mapping that a JSON text holds, comments and trailing commas allowed; Hjson where the package is there.

    Raises UserError with `source:line:column` for what cannot be parsed.
    """
    return _parse(text, source)[0]


def _parse(text: str, source: str) -> tuple[dict[str, Any], str | None]:
    """The mapping, and the text without comments where it is JSON then."""
    plain = _without_comments(text)
    if not plain.strip():
        raise UserError(f"{source}: is empty; expected a ds_config.json")
    is_json = True
    try:
        value = json.loads(plain, object_pairs_hook=_unique)
    except _Duplicate as error:
        raise UserError(_twice(source, plain, error)) from None
    except json.JSONDecodeError as error:
        value, is_json = _parse_hjson(text, source, error), False
    except RecursionError:
        raise UserError(f"{source}: nested too deeply; expected a ds_config.json") from None
    except ValueError:  # CPython refuses integers of more than 4300 digits
        raise UserError(f"{source}: holds a number of thousands of digits; expected a ds_config.json") from None
    if not isinstance(value, dict):
        raise UserError(f"{source}: expected a mapping ({{...}}), got {_kind(value)}")
    return dict(value), plain if is_json else None


def _parse_hjson(text: str, source: str, error: json.JSONDecodeError) -> Any:
    """The text as Hjson; its error, or without the package that of plain JSON, as a UserError."""
    plain = f"{source}:{error.lineno}:{error.colno}: not valid JSON: {error.msg[0].lower()}{error.msg[1:]}"
    try:
        import hjson
    except ImportError:
        raise UserError(f"{plain}; correct it there, or for an Hjson file pip install 'heavylift[{EXTRA}]'") from None
    try:
        return hjson.loads(text, object_pairs_hook=_unique)
    except _Duplicate as duplicate:
        raise UserError(f"{source}: {duplicate}") from None
    except hjson.HjsonDecodeError:
        # hjson reads on as far as it can, so plain JSON's place is nearer to the mistake
        raise UserError(f"{plain} (nor is it Hjson); correct it there") from None
    except (RecursionError, ValueError, LookupError):  # the package looks past the end of an unclosed comment
        raise UserError(f"{plain}; correct it there") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Duplicate(key)
        found[key] = value
    return found


def _twice(source: str, plain: str, error: _Duplicate) -> str:
    """The message on a key that stands twice in one block, at the second place where that is known."""
    found = find_twice(plain)
    if found is None:
        return f"{source}: {error}"
    path, first, second = found
    return f"{source}:{second}: {path}: given twice in one block, first on line {first}; remove one"


def _without_comments(text: str) -> str:
    """Comments and trailing commas replaced by blanks, so that lines and columns stay."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match["string"] else re.sub(r"[^\n]", " ", match[0])

    return _TOKEN.sub(blank, text)


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else shown(value)
