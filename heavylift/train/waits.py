"""Where the optimizer of the host tier spent its time in a step, and how much of that training had to wait for.

The ranges of `heavylift.offload.timeline` are added up per step: a range counts in the step in which it ended. Work of
the host tier is the CPU kernel, streaming states through the GPU, copying down what waited there, waiting for a slot,
issuing the copies up, and adding up gradients. It is hidden while the thread that trains is not blocked at a gate or
for the worker; work in that thread itself never is. The worker's wait for a gradient that is not there yet is no work:
counting it would flatter the hidden share.

Left out: the time of the copies themselves, but for what a gate sees of them (`gate_device_s`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields

from heavylift.config.schema import Schedule
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.timeline import Activity, Range
from heavylift.transfer import RankNumbers

WAITS = (Activity.GATE, Activity.DRAIN)
WORK = (Activity.ADAMW, Activity.STREAM, Activity.FETCH, Activity.SLOT, Activity.ISSUE, Activity.ACCUMULATE)


@dataclass(frozen=True)
class StepWaits:
    """One step's seconds, each the mean over the processes."""

    step: int
    """As in metrics.jsonl."""
    schedule: str
    """Which one ran: `synchronous`, `immediate`, `deferred` or `speculative`."""
    cpu_s: float
    """In the CPU kernel."""
    stream_s: float
    """Streaming states over the bus, through the GPU's kernel and back."""
    fetch_s: float
    """The CPU with nothing to step, as it was still on its way down: gradients that waited on the device, and
    parameters that are half of split masters. Beside a GPU also of waiting for a free staging slot."""
    slot_s: float
    """The worker waiting for a staging slot, that is, for a copy up; or see `fetch_s`."""
    issue_s: float
    """Issuing the copies up, where the compiled kernel does not (it does beside a GPU); without a GPU, doing them."""
    accumulate_s: float
    """Adding gradients of micro-batches up, on the worker; under `synchronous` with their copies down."""
    gradient_s: float
    """Waiting for gradients to be computed and copied down."""
    gate_s: float
    """The training thread blocked at gates."""
    drain_s: float
    """The training thread blocked until the worker was idle, or had added up what lay in a staging slot."""
    gate_device_s: float
    """All-gather streams waiting at gates, measured by the GPU: an upper bound of what it lost there."""
    exposed_s: float
    """Work that was not hidden."""
    hidden: float | None = field(init=False)
    """Share of the work that training did not wait for, 0 to 1; None where there was no work."""

    def __post_init__(self) -> None:
        hidden = max(0.0, 1 - self.exposed_s / self.work_s) if self.work_s > 0 else None
        object.__setattr__(self, "hidden", hidden)

    @property
    def work_s(self) -> float:
        """All work of the host tier."""
        return self.cpu_s + self.stream_s + self.fetch_s + self.slot_s + self.issue_s + self.accumulate_s


def waits_text(waits: StepWaits) -> str:
    """The short form at the end of the step line: work and what the CPU waited for (`d2h`, `h2d`: copies down and up),
    how much of it was hidden, and what the training thread waited for."""
    hidden = "-" if waits.hidden is None else f"{waits.hidden:.0%}"
    bus = f" bus {waits.stream_s:.2f}s" if waits.stream_s > 0 else ""
    copies = f" d2h {waits.gradient_s + waits.fetch_s:.2f}s h2d {waits.slot_s + waits.issue_s:.2f}s"
    return f"offload: cpu {waits.cpu_s:.2f}s{bus}{copies} hidden {hidden} gate {waits.gate_s + waits.drain_s:.2f}s"


class WaitWatch:
    """Makes `StepWaits` of the ranges of successive steps."""

    def __init__(self, worker_threads: Collection[int]) -> None:
        """`worker_threads`: those whose work can be hidden (`TieredAdamW.worker_threads`)."""
        self._worker_threads = frozenset(worker_threads)
        self._last_blocked: list[Range] = []

    def step(self, step: int, schedule: Schedule, ranges: Sequence[Range], gate_device_s: float) -> StepWaits:
        """This process's seconds. `ranges`: all that ended since the last call."""
        blocked = [r for r in ranges if r.activity in WAITS or self._waits_for_slot(r)]
        work = [r for r in ranges if r.activity in WORK and not self._waits_for_slot(r)]
        exposed_s = sum(r.seconds for r in work if r.thread not in self._worker_threads)
        for thread in self._worker_threads:
            # work that began in the step before may have been waited for there
            exposed_s += shared_seconds([r for r in work if r.thread == thread], self._last_blocked + blocked)
        self._last_blocked = blocked
        return StepWaits(
            step=step,
            schedule=schedule.value,
            cpu_s=_seconds(ranges, Activity.ADAMW),
            fetch_s=_seconds(ranges, Activity.FETCH),
            slot_s=_seconds(work, Activity.SLOT),
            stream_s=_seconds(ranges, Activity.STREAM),
            issue_s=_seconds(ranges, Activity.ISSUE),
            accumulate_s=_seconds(ranges, Activity.ACCUMULATE),
            gradient_s=_seconds(ranges, Activity.GRADIENT),
            gate_s=_seconds(ranges, Activity.GATE),
            drain_s=_seconds(ranges, Activity.DRAIN) + _seconds(blocked, Activity.SLOT),
            gate_device_s=gate_device_s,
            exposed_s=exposed_s,
        )

    def _waits_for_slot(self, one: Range) -> bool:
        """Whether backward stood still because the worker had not yet added up what is in its staging slot."""
        return one.activity is Activity.SLOT and bool(self._worker_threads) and one.thread not in self._worker_threads


def _seconds(ranges: Iterable[Range], activity: Activity) -> float:
    return sum((r.seconds for r in ranges if r.activity is activity), 0.0)


def shared_seconds(ones: Sequence[Range], others: Sequence[Range]) -> float:
    """Seconds in which a range of `ones` and one of `others` were under way.

    Neither may overlap within itself: each belongs to one thread.
    """
    return sum((max(0.0, min(a.stop_s, b.stop_s) - max(a.start_s, b.start_s)) for a in ones for b in others), 0.0)


def seconds_names() -> list[str]:
    """The fields of `StepWaits` that are measured."""
    return [f.name for f in fields(StepWaits) if f.name.endswith("_s")]


def take_waits(
    watch: WaitWatch, step: int, optimizer: TieredAdamW, ranges: Sequence[Range], numbers: RankNumbers
) -> StepWaits | None:
    """The waits of a step that `optimizer` has taken, means over the processes; None without a host tier. A collective.

    `ranges`: what its timeline has taken since the last call.
    """
    if not optimizer.options.has_host_tier:
        return None
    return mean_over_ranks(watch.step(step, optimizer.last_schedule, ranges, optimizer.take_device_gate_s()), numbers)


def mean_over_ranks(waits: StepWaits, numbers: RankNumbers) -> StepWaits:
    """The mean of all processes' seconds. A collective; step and schedule are the same everywhere."""
    names = seconds_names()
    every = numbers.gather([getattr(waits, name) for name in names])
    means = [sum(column) / len(every) for column in zip(*every, strict=True)]
    return StepWaits(step=waits.step, schedule=waits.schedule, **dict(zip(names, means, strict=True)))
