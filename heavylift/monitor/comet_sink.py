"""Comet. What is not given comes from Comet's own environment variables and .comet.config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heavylift.errors import UserError
from heavylift.monitor.events import Event
from heavylift.monitor.packages import import_for, one_line


class SampleThrottle:
    """Lets an event through once in `interval` units of x, counted for each name by itself; the first one always."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._last: dict[str, int] = {}

    def lets_through(self, name: str, x: int) -> bool:
        """Whether to log this event; remembers it if so."""
        if name in self._last and x - self._last[name] < self.interval:
            return False
        self._last[name] = x
        return True


class CometSink:
    """One experiment; `samples_log_interval` samples pass between two values of an event.

    `online` False writes an archive for `comet upload`. Raises UserError where the package is missing or the
    experiment cannot be started.
    """

    def __init__(
        self,
        samples_log_interval: int = 100,
        project: str | None = None,
        workspace: str | None = None,
        api_key: str | None = None,
        experiment_name: str | None = None,
        experiment_key: str | None = None,
        online: bool | None = None,
        mode: str | None = None,
    ) -> None:
        comet_ml: Any = import_for("comet")
        self._throttle = SampleThrottle(samples_log_interval)
        try:
            self._experiment: Any = comet_ml.start(
                api_key=api_key,
                workspace=workspace,
                project=project,
                experiment_key=experiment_key,
                mode=mode,
                online=online,
            )
            if experiment_name is not None:
                self._experiment.set_name(experiment_name)
        except Exception as error:
            raise UserError(
                f"monitor comet: cannot start an experiment: {one_line(error)}; set COMET_API_KEY, or "
                "COMET_START_ONLINE=0 (in a ds_config: `online: false`) to keep it on this machine"
            ) from None

    def write(self, events: Sequence[Event]) -> None:
        """Logs the events whose turn it is."""
        for name, value, step in events:
            if self._throttle.lets_through(name, step):
                self._experiment.log_metric(name=name, value=value, step=step)

    def flush(self) -> None:
        """Waits until the values are sent."""
        self._experiment.flush()

    def close(self, failed: bool = False) -> None:
        """Ends the experiment; waits until all is written or uploaded."""
        self._experiment.end()
