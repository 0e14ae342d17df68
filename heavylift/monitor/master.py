"""All sinks of a run as one. What cannot be opened is the user's error; what fails later does not end the training."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from heavylift.config.deepspeed.settings import MonitorSettings
from heavylift.config.words import named, nearest
from heavylift.errors import UserError
from heavylift.monitor.comet_sink import CometSink
from heavylift.monitor.csv_sink import CsvSink
from heavylift.monitor.events import Event, Sink
from heavylift.monitor.packages import import_for, one_line
from heavylift.monitor.tensorboard_sink import TensorBoardSink
from heavylift.monitor.wandb_sink import WandbSink

SINKS: dict[str, Callable[..., Sink]] = {
    "tensorboard": TensorBoardSink,
    "csv": CsvSink,
    "wandb": WandbSink,
    "comet": CometSink,
}


class MonitorMaster:
    """Writes events to every sink of `monitors`. Make it on every rank, `enabled` on rank 0 only; a context manager.

    Raises UserError, one line per problem, for an unknown kind or option and for a sink that cannot be opened.
    """

    def __init__(self, monitors: Sequence[MonitorSettings], enabled: bool) -> None:
        problems: list[str] = []
        self._sinks: dict[str, Sink] = {}
        if enabled:
            check_monitors(monitors)
        for settings in monitors if enabled else ():
            try:
                self._sinks[settings.kind] = SINKS[settings.kind](**settings.options)
            except UserError as error:
                problems += error.problems
        if problems:
            self.close()
            raise UserError(*problems)

    @property
    def enabled(self) -> bool:
        """Whether anything is written: False on ranks that write nothing, and when every sink has failed."""
        return bool(self._sinks)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Writes (name, value, x) to all sinks. Values may be tensors of one element.

        A sink that fails is left out from then on, with one line on standard error.
        """
        if self._sinks:
            events = [(name, float(value), int(x)) for name, value, x in event_list]
            self._each(lambda sink: sink.write(events))

    def flush(self) -> None:
        """Writes what is buffered."""
        self._each(lambda sink: sink.flush())

    def close(self, failed: bool = False) -> None:
        """Ends all sinks; nothing is written after that. `failed`: the run did not reach its end."""
        self._each(lambda sink: sink.close(failed))
        self._sinks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close(failed=kind is not None)

    def _each(self, action: Callable[[Sink], Any]) -> None:
        for kind, sink in list(self._sinks.items()):
            try:
                action(sink)
            # programs of others over the network: whatever goes wrong there must not cost a training run
            except Exception as error:
                del self._sinks[kind]
                print(
                    f"monitor {kind}: stopped, training goes on without it: {one_line(error)}",
                    file=sys.stderr,
                    flush=True,
                )


def check_monitors(monitors: Sequence[MonitorSettings]) -> None:
    """Raises UserError, one line per problem, for unknown kinds and options and for packages that are missing or
    broken. Opens and writes nothing."""
    problems: list[str] = []
    for settings in monitors:
        problems += (wrong := _option_problems(settings))
        if wrong:
            continue
        try:
            import_for(settings.kind)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)


def _option_problems(settings: MonitorSettings) -> list[str]:
    if settings.kind not in SINKS:
        return [f"monitor {named(settings.kind)}: expected one of {', '.join(SINKS)}"]
    known = inspect.signature(SINKS[settings.kind]).parameters
    problems = []
    for key in settings.options:
        if key not in known:
            guess = nearest(key, known)
            hint = f"did you mean {guess}?" if guess else f"it takes {', '.join(known)}"
            problems.append(f"monitor {settings.kind}: {named(key)}: not an option; {hint}")
    return problems
