"""What a ds_config.json means here, as tables for the terminal: key by key, and what it comes to.

Left out: the memory plan, which needs a model (`heavylift.cli.memory_table`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from rich.table import Table
from rich.text import Text

from heavylift.config.deepspeed.batch import ACCUMULATION, MICRO, TRAIN
from heavylift.config.deepspeed.notes import without_effect
from heavylift.config.deepspeed.reading import KeyReport, Reading
from heavylift.config.deepspeed.settings import OptimizerSettings, Settings
from heavylift.config.deepspeed.training import OURS

_STYLES = {
    "done": "green",
    "auto": "cyan",
    "no effect": "yellow",
    "off": "dim",
    "comment": "dim",
    "refused": "red",
    "error": "red",
}
_MAX_VALUE = 40


def key_table(reading: Reading) -> Table:
    """One row per key that the file gives: value, status, what it means here."""
    table = Table(title=f"{reading.source}, key by key", title_justify="left")
    for column in ("key", "value", "status", "here"):
        table.add_column(column, overflow="fold")
    no_effect = {reading.written[path]: why for path, why in without_effect(reading).items()}
    for report in sorted(reading.reports, key=_place):
        status, text = report.status, report.text
        if status == "done" and report.path in no_effect:
            status, text = "no effect", no_effect[report.path]
        table.add_row(
            Text(report.path), Text(shown_json(report.value)), Text(status, style=_STYLES[status]), Text(text)
        )
    return table


def _place(report: KeyReport) -> tuple[bool, str]:
    # plain top-level keys first, then block by block
    return "." in report.path, report.path


def settings_table(settings: Settings) -> Table:
    """The resolved settings, defaults included."""
    table = Table(title="what it comes to", title_justify="left")
    table.add_column("setting", overflow="fold")
    table.add_column("value", overflow="fold")
    for name, value in flattened(settings):
        if name != "notes":
            table.add_row(Text(name), Text(value))
    return table


def flattened(settings: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted name and text of every field of a (nested) dataclass."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, OptimizerSettings) and value.name not in OURS.values():
            # the other fields are AdamW's
            yield f"{prefix}{field.name}.name", value.name
            yield f"{prefix}{field.name}.more", _text(value.more)
            continue
        if is_dataclass(value) and not isinstance(value, type):
            yield from flattened(value, f"{prefix}{field.name}.")
        elif field.name == "monitors":
            yield prefix + field.name, ", ".join(monitor.kind for monitor in value) or "none"
        else:
            yield prefix + field.name, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return ", ".join(_text(one) for one in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(one)}" for key, one in value.items()) or "none"
    return str(value)


def shown_json(value: Any) -> str:
    """A value as the file has it, cut where it is long."""
    if isinstance(value, float) and value == value // 1 and abs(value) >= 1e6:
        return f"{value:g}"
    text = json.dumps(value, default=str)
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 3] + "..."


def natural_world_size(reading: Reading) -> int:
    """The ranks that the file's own batch keys ask for where it gives all three, else 1."""
    config = reading.config
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if train is None or micro is None or accumulation is None or {TRAIN, MICRO, ACCUMULATION} & reading.bad:
        return 1
    size, rest = divmod(train, micro * accumulation)
    return size if size >= 1 and rest == 0 else 1
