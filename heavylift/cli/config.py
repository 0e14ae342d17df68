"""`heavylift config`: what a ds_config.json means here, and the recipe that it comes to.

Neither imports torch, unless a memory plan is asked for.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import rich.box
from rich.console import Console
from rich.table import Table

from heavylift.config.deepspeed.convert import convert
from heavylift.config.deepspeed.explain import key_table, natural_world_size, settings_table
from heavylift.config.deepspeed.parse import Interpretation, interpret
from heavylift.errors import UserError

_NARROWEST = 120
"""Columns where the output is no terminal: tables that nobody sees wrapped to 80."""


def run_explain(config: str, world_size: int | None, model: str | None, seq: int | None) -> int:
    """Prints the file key by key, what it comes to, and with a model its memory plan. Returns the exit code.

    `world_size`: None takes the number of ranks that the file's own batch keys ask for. Raises UserError with every
    problem of the file, after the table of keys, which shows each in its place.
    """
    if seq is not None and model is None:
        raise UserError("--seq: counts activations of a model; give its folder with --model")
    found, ranks = _interpret(config, world_size)
    console = _console()
    _print(console, key_table(found.reading))
    if found.settings is None:
        raise UserError(*found.problems)
    console.print()
    _print(console, settings_table(found.settings))
    origin = "" if world_size is not None else ", from the batch keys" if ranks > 1 else "; --world-size N for more"
    console.print(f"world size {ranks}{origin}", highlight=False)
    for note in found.settings.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    if model is not None:
        from heavylift.cli.memory_table import memory_table

        console.print()
        _print(console, memory_table(found.settings, model, ranks, seq))
    return 0


def run_convert(
    config: str, model: str, dataset: str, output: Path | None, world_size: int | None, output_dir: str | None
) -> int:
    """Writes the recipe of a ds_config to `output` (else to the screen). Returns the exit code.

    Raises UserError for problems of the file, and where `output` exists or cannot be written.
    """
    found, ranks = _interpret(config, world_size)
    if found.settings is None:
        raise UserError(*found.problems)
    known = world_size if world_size is not None else ranks if ranks > 1 else None
    run_folder = output_dir or f"runs/{Path(config).stem or 'converted'}"
    text = convert(found.settings, found.reading, model=model, dataset=dataset, output_dir=run_folder, world_size=known)
    if output is None:
        sys.stdout.write(text)
        return 0
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{output}: exists and is not overwritten; change -o") from None
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror}; change -o") from None
    print(f"{output} is the recipe; next: heavylift train {output}")
    return 0


def _interpret(config: str, world_size: int | None) -> tuple[Interpretation, int]:
    """The file and the ranks that it was read for."""
    path = Path(config)
    if path.suffix in (".yaml", ".yml"):  # which Hjson reads, as something else
        raise UserError(f"{config}: expected a ds_config.json, got a recipe (YAML); heavylift train and bench read it")
    ranks = world_size or natural_world_size(interpret(path, 1, leave_open=True).reading)
    return interpret(path, ranks, leave_open=True), ranks


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else max(_NARROWEST, shutil.get_terminal_size().columns))


def _print(console: Console, table: Table) -> None:
    table.box = rich.box.SIMPLE_HEAD
    console.print(table)
