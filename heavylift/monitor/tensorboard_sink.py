"""TensorBoard event files, through torch's writer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heavylift.monitor.events import Event
from heavylift.monitor.folders import log_folder
from heavylift.monitor.packages import import_for


class TensorBoardSink:
    """Writes scalars to `output_path`/`job_name`; `tensorboard --logdir` takes that folder or one above it.

    Raises UserError where the package is missing or the folder cannot be made.
    """

    def __init__(self, output_path: str | None = "", job_name: str = "DeepSpeedJobName") -> None:
        module: Any = import_for("tensorboard")
        self.folder = log_folder("tensorboard", output_path, job_name)
        self._writer = module.SummaryWriter(log_dir=str(self.folder))

    def write(self, events: Sequence[Event]) -> None:
        """Adds the scalars and flushes."""
        for name, value, step in events:
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def flush(self) -> None:
        """Writes what is buffered."""
        self._writer.flush()

    def close(self, failed: bool = False) -> None:
        """Closes the event file."""
        self._writer.close()
