"""Weights & Biases. WANDB_MODE=offline keeps a run on this machine (`wandb sync` uploads it later)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from heavylift.errors import UserError
from heavylift.monitor.events import Event
from heavylift.monitor.packages import import_for, one_line


class WandbSink:
    """One run in `project`, of `team` (an entity) and in `group` where given.

    `name`: of the run; `folder`: where its files go (default ./wandb); `config`: what the run's page shows as its
    configuration. A run that the script has started itself is used and left open. Raises UserError where the package
    is missing or the run cannot be started (nobody logged in, no network).
    """

    def __init__(
        self,
        group: str | None = None,
        team: str | None = None,
        project: str | None = "deepspeed",
        name: str | None = None,
        folder: Path | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        wandb: Any = import_for("wandb")
        self._owned = wandb.run is None
        self._run: Any = wandb.run
        if self._owned:
            try:
                self._run = wandb.init(project=project, group=group, entity=team, name=name, dir=folder, config=config)
            except Exception as error:
                raise UserError(
                    f"monitor wandb: cannot start a run: {one_line(error)}; run `wandb login`, or set "
                    "WANDB_MODE=offline to keep it on this machine"
                ) from None

    def write(self, events: Sequence[Event]) -> None:
        """Logs the events, those of one x together: each call is a row."""
        for step, row in groupby(events, key=lambda event: event[2]):
            self._run.log({name: value for name, value, _ in row}, step=step)

    def flush(self) -> None:
        """wandb's own process writes; it is behind by about a second."""

    def close(self, failed: bool = False) -> None:
        """Ends the run, as failed or not, if it was started here; waits until all is written or uploaded."""
        if self._owned:
            self._run.finish(exit_code=int(failed))
