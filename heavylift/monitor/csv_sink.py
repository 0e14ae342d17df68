"""CSV files, one per event name: `Train/Samples/lr` goes to `Train_Samples_lr.csv` with the columns step and lr."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import TextIO

from heavylift.monitor.events import Event
from heavylift.monitor.folders import log_folder


class CsvSink:
    """Appends to `output_path`/`job_name`/*.csv; a run that goes on adds rows, not a second header.

    Raises UserError where the folder cannot be made.
    """

    def __init__(self, output_path: str | None = "", job_name: str = "DeepSpeedJobName") -> None:
        self.folder = log_folder("csv", output_path, job_name)
        self._files: dict[str, TextIO] = {}

    def write(self, events: Sequence[Event]) -> None:
        """Adds a row for each event and flushes. Raises OSError."""
        touched = set()
        for name, value, step in events:
            file = self._file(name)
            csv.writer(file).writerow([step, value])
            touched.add(file)
        for file in touched:
            file.flush()

    def _file(self, name: str) -> TextIO:
        stem = name.replace("/", "_").replace(" ", "_")
        if stem not in self._files:
            path = self.folder / f"{stem}.csv"
            file = open(path, "a", newline="", encoding="utf-8")
            self._files[stem] = file
            if file.tell() == 0:
                csv.writer(file).writerow(["step", name.rsplit("/", 1)[-1]])
        return self._files[stem]

    def flush(self) -> None:
        """Every write has flushed."""

    def close(self, failed: bool = False) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
