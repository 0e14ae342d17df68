"""Reads JSON-lines files into conversations, and says for every bad row what to do about it.

One row is one conversation, in one of two shapes:

* `messages`: `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}`
* `alpaca`: `{"instruction": "...", "input": "...", "output": "...", "system": "...", "history": [["q", "a"]]}`

Left out on purpose: tokenizers and torch. This module runs in the preflight, before anything heavy is imported.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from heavylift.errors import UserError

RowFormat = Literal["auto", "messages", "alpaca"]

ROLES = ("system", "user", "assistant", "tool")
MAX_PROBLEMS_SHOWN = 20

# words of other tools for the same roles
_ROLE_SYNONYMS = {
    "human": "user",
    "customer": "user",
    "prompter": "user",
    "developer": "system",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "chatgpt": "assistant",
    "function": "tool",
    "observation": "tool",
}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: who speaks (one of `ROLES`) and the text."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns of one row; `source` is `file:line` with the real 1-based line, for messages to the user."""

    messages: tuple[Message, ...]
    source: str


class _RowError(Exception):
    """Why a row cannot be used and what to do; the caller knows the file and the line."""


def read_rows(files: Sequence[Path], format: RowFormat) -> list[Conversation]:
    """All conversations of `files`, in order; blank lines are skipped.

    Raises UserError with one problem per bad row (`file:line: what; do this`), collected over all files. The first
    `MAX_PROBLEMS_SHOWN` are spelled out.
    """
    assert format in ("auto", "messages", "alpaca"), format
    rows: list[Conversation] = []
    problems: list[str] = []
    for file in files:
        try:
            data = _read_file(file)
        except _RowError as error:
            problems.append(f"{file}: {error}")
            continue
        num_before = len(rows) + len(problems)
        for number, line in _lines(data):
            source = f"{file}:{number}"
            try:
                rows.append(Conversation(_parse_line(line, format), source))
            except _RowError as error:
                problems.append(f"{source}: {error}")
        if len(rows) + len(problems) == num_before:
            problems.append(
                f"{file}: empty data set: expected one JSON object per line; fill it or change data.dataset"
            )
    if problems:
        raise UserError(*capped(problems))
    return rows


def capped(problems: Sequence[str]) -> list[str]:
    """The first `MAX_PROBLEMS_SHOWN` problems, and how many were left out."""
    shown = list(problems[:MAX_PROBLEMS_SHOWN])
    if len(problems) > len(shown):
        shown.append(f"... and {len(problems) - len(shown)} more problems of this kind")
    return shown


def _read_file(file: Path) -> bytes:
    if file.is_dir():
        raise _RowError("expected a JSON-lines file, found a folder; name the files in it in data.dataset")
    if file.exists() and not file.is_file():  # a pipe would be waited for, and is empty for the next process
        raise _RowError("expected a file, found a pipe or device, which cannot be read twice; write the rows to a file")
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise _RowError("no such file; correct the path in data.dataset") from None
    except OSError as error:
        raise _RowError(f"cannot be read ({error.strerror}); correct data.dataset or the file's permissions") from None


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    # split on newlines only: str.splitlines would also split at U+2028 inside a text and shift the numbers
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _parse_line(line: bytes, format: RowFormat) -> tuple[Message, ...]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _RowError(f"not UTF-8 text (byte {error.start + 1} of the line); save the file as UTF-8") from None
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "write one whole JSON object per line"
        if text.lstrip().startswith("["):
            hint = "this looks like a JSON array: write one object per line instead"
        raise _RowError(f"broken JSON at column {error.colno}: {error.msg}; {hint}") from None
    except (ValueError, RecursionError) as error:
        raise _RowError(f"JSON that cannot be read ({error}); simplify the row") from None
    if not isinstance(row, dict):
        what = "this looks like a JSON array: write one object per line" if isinstance(row, list) else "wrap it in {}"
        raise _RowError(f"expected a JSON object, got {_kind(row)}; {what}")
    messages = _parser(row, format)(row)
    if not any(message.role == "assistant" for message in messages):
        raise _RowError("no assistant turn, so nothing to learn from; add the answer or remove the row")
    return messages


def _parser(row: dict[str, Any], format: RowFormat) -> Callable[[dict[str, Any]], tuple[Message, ...]]:
    if format == "messages" or (format == "auto" and "messages" in row):
        return _parse_messages
    if format == "alpaca" or "instruction" in row:
        return _parse_alpaca
    keys = ", ".join(map(repr, list(row)[:6])) or "no keys"
    hint = "rename them"
    if "conversations" in row:
        hint = 'turn the ShareGPT "conversations" with "from"/"value" into "messages" with "role"/"content"'
    raise _RowError(f'expected "messages", or "instruction" and "output", got {keys}; {hint}')


def _parse_messages(row: dict[str, Any]) -> tuple[Message, ...]:
    if "messages" not in row:
        raise _RowError('"messages" is missing; add it, or set data.format to alpaca or auto')
    turns = row["messages"]
    if not isinstance(turns, list) or not turns:
        raise _RowError(
            f'"messages" must be a list of turns, got {_kind(turns)}; write [{{"role": ..., "content": ...}}]'
        )
    return tuple(_parse_turn(turn, f"messages[{i}]") for i, turn in enumerate(turns))


def _parse_turn(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise _RowError(f'{where} must be an object with "role" and "content", got {_kind(turn)}; rewrite the turn')
    role = turn.get("role")
    if not isinstance(role, str):
        raise _RowError(f'{where}: "role" must be one of {", ".join(ROLES)}, got {_kind(role)}; add it')
    if role not in ROLES:
        near = _ROLE_SYNONYMS.get(role.lower()) or next(iter(difflib.get_close_matches(role.lower(), ROLES, 1)), None)
        hint = f'write "{near}"' if near else "use one of these"
        raise _RowError(f'{where}: unknown role "{role}", expected {", ".join(ROLES)}; {hint}')
    return Message(role, _text(turn, "content", f"{where}: "))


def _parse_alpaca(row: dict[str, Any]) -> tuple[Message, ...]:
    messages: list[Message] = []
    if row.get("system") not in (None, ""):
        messages.append(Message("system", _text(row, "system")))
    history = row.get("history")
    if history is not None and not isinstance(history, list):
        raise _RowError(f'"history" must be a list of [question, answer] pairs, got {_kind(history)}; rewrite it')
    for i, pair in enumerate(history or ()):
        if not isinstance(pair, list) or len(pair) != 2:
            raise _RowError(f"history[{i}] must be a pair [question, answer], got {_kind(pair)}; rewrite it")
        turns = {"question": pair[0], "answer": pair[1]}
        messages.append(Message("user", _text(turns, "question", f"history[{i}]: ")))
        messages.append(Message("assistant", _text(turns, "answer", f"history[{i}]: ")))
    question = _text(row, "instruction")
    if row.get("input") not in (None, ""):
        question += "\n\n" + _text(row, "input")
    messages += [Message("user", question), Message("assistant", _text(row, "output"))]
    return tuple(messages)


def _text(row: dict[str, Any], key: str, where: str = "") -> str:
    if key not in row:
        raise _RowError(f'{where}"{key}" is missing; add it')
    value = row[key]
    if not isinstance(value, str):
        raise _RowError(f'{where}"{key}" must be text, got {_kind(value)}; put a string there')
    if not value.strip():
        raise _RowError(f'{where}"{key}" is empty; write the text or remove the row')
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _RowError(
            f'{where}"{key}" holds half a surrogate pair (\\u{ord(value[error.start]):04x}), not a character; '
            "write the whole pair or remove it"
        ) from None
    return value


def _kind(value: Any) -> str:
    """What a JSON value is, in JSON's own words."""
    if value is None:
        return "null or nothing"
    if isinstance(value, list):
        return "an empty list" if not value else f"a list of {len(value)}"
    names = {bool: "true/false", int: "a number", float: "a number", str: "text", dict: "an object"}
    return names[type(value)]
