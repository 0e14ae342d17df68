"""On which line of a JSON file each key stands, for messages. Left out: keys of objects inside of lists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from heavylift.config.words import named

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]')


def key_lines(text: str) -> dict[str, int]:
    """Dotted path of each key, as messages name it -> its line, from 1. `text`: JSON that has been parsed before."""
    found: dict[str, int] = {}
    for path, line, _ in _keys(text):
        found.setdefault(path, line)
    return found


def find_twice(text: str) -> tuple[str, int, int] | None:
    """Dotted path and both lines of the first key that stands twice in one block; None where it is inside of a list."""
    lines: dict[tuple[int, str], int] = {}
    for path, line, key in _keys(text):
        if key in lines:
            return path, lines[key], line
        lines[key] = line
    return None


def _keys(text: str) -> Iterator[tuple[str, int, tuple[int, str]]]:
    """Dotted path and line of each key; the number of its block and the key in full."""
    prefixes: list[str | None] = []  # of the keys within each open bracket; None: within a list
    blocks: list[int] = []
    path = ""
    awaits_key, line, end = False, 1, 0
    for number, token in enumerate(_TOKEN.finditer(text)):
        line += text.count("\n", end, token.start())
        end = token.start()
        sign = token[0]
        if sign in ("{", "["):
            inner = f"{path}." if path else ""
            in_list = sign == "[" or (len(prefixes) > 0 and prefixes[-1] is None)
            prefixes.append(None if in_list else inner)
            blocks.append(number)
            awaits_key = not in_list
        elif sign in ("}", "]"):
            prefixes.pop()
            blocks.pop()
            awaits_key = False
        elif sign == ",":
            awaits_key = prefixes[-1] is not None
        elif sign == ":":
            awaits_key = False
        elif awaits_key:
            key = json.loads(sign)
            path = f"{prefixes[-1]}{named(key)}"
            yield path, line, (blocks[-1], key)


def line_of(place: str, lines: dict[str, int]) -> int | None:
    """The line of a key, or of the innermost block around it that is there; None where nothing of it is."""
    while place:
        if place in lines:
            return lines[place]
        place = place.rpartition(".")[0]
    return None
