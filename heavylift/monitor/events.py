"""What is written: events, the interface of a sink, and DeepSpeed's names of events.

Left out: the events of `heavylift train` (`heavylift.train.monitors`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

Event = tuple[str, float, int]
"""(name, value, x): x is the number of samples seen by all ranks, or the optimizer step in `heavylift train`."""

LR_EVENT = "Train/Samples/lr"
LOSS_EVENT = "Train/Samples/train_loss"
LOSS_SCALE_EVENT = "Train/Samples/loss_scale"
_ELAPSED_EVENT = "Train/Samples/elapsed_time_ms_"


class Sink(Protocol):
    """Where events go."""

    def write(self, events: Sequence[Event]) -> None:
        """Writes the events, in order of x; whoever looks sees them soon after."""

    def flush(self) -> None:
        """Returns when all is written, as far as the sink's own program can tell."""

    def close(self, failed: bool = False) -> None:
        """Ends it; `failed`: the run did not reach its end."""


def step_events(
    global_samples: int, lr: float, *, loss: float | None = None, loss_scale: float | None = None
) -> list[Event]:
    """Events of one optimizer step; `loss` and `loss_scale` where there are any."""
    values = {LR_EVENT: lr, LOSS_EVENT: loss, LOSS_SCALE_EVENT: loss_scale}
    return [(name, value, global_samples) for name, value in values.items() if value is not None]


def elapsed_events(global_samples: int, elapsed_ms: Mapping[str, float]) -> list[Event]:
    """Events of `wall_clock_breakdown`: milliseconds of forward, backward, backward_inner, backward_allreduce, step."""
    return [(_ELAPSED_EVENT + name, value, global_samples) for name, value in elapsed_ms.items()]
