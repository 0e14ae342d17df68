"""The device's peak in one step: forward and backward walked group by group, as FSDP2 gathers and reduces them.

Per group of `n` parameters over `W` shards, `b` bytes each:

* gathered: what the all-gather wrote and the copy in the parameters' shapes, 2 b n; the next group, fetched ahead, b n;
* backward: its gradients, whole, b n; then the reduction's input in float32, 4 n, its output, 4 n / W, and the rounded
  shard, b n / W, which stays until it has been accumulated or stepped;
* the reduction's input is let go when the next group reduces.

Below stage 3 all groups stay gathered; with gradients that are reduced once per step (stages 0 and 1 with
accumulation) they add up whole, in float32.

Gradients that the host steps are counted while their copies may be under way, the others until backward has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupLoad:
    """What one gather group means for the device and, with `host_bytes`, for the host."""

    name: str
    num_params: int
    """Whole, frozen ones too."""
    shard_numel: int
    """Elements of this process's trainable shard, padding included."""
    kept_bytes: int = 0
    """Activations between forward and backward."""
    work_bytes: int = 0
    """Activations and their gradients at the peak of its backward, beside what was kept."""
    host_bytes: int = 0
    """Host memory for its input between forward and backward."""
    segment_numels: tuple[int, ...] = ()
    """`shard_numel` parameter by parameter; without them it is planned as one parameter."""


@dataclass(frozen=True)
class Peak:
    """What is in use on the device at the worst moment, parameter shards and optimizer states excepted."""

    moment: str
    """When: which group, and what is done with it."""
    grad_bytes: int = 0
    """Reduced gradients."""
    gathered_bytes: int = 0
    """Whole parameters and gradients, and the buffers of collectives."""
    activation_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.grad_bytes + self.gathered_bytes + self.activation_bytes


def find_peak(
    loads: Sequence[GroupLoad],
    *,
    itemsize: int,
    num_shards: int,
    stage: int,
    waits: Sequence[bool],
    max_copying: int,
    reduces_once: bool,
) -> Peak:
    """The worst moment of a step. `loads`: the gather groups in forward order, the root first.

    `waits`: of each group, whether its reduced gradient waits for the step on the device. Of the others `max_copying`
    are there at one time, on their way to the host; 0 where they are accumulated elsewhere.
    `reduces_once`: several micro-batches add up before one reduction (stages 0 and 1).
    """
    if not loads:
        return Peak("nothing to train")
    moments: list[Peak] = []
    kept = sum(load.kept_bytes for load in loads)
    # the root is gathered from the first forward to the end of backward, and so is everything below stage 3
    standing = sum(load.num_params for load in loads) if stage < 3 else loads[0].num_params
    base = standing * itemsize
    whole_grads = sum(load.shard_numel * num_shards for load in loads)
    # a tied head's gradient waits at the root for the embedding's
    base += 4 * whole_grads if reduces_once else loads[0].shard_numel * num_shards * itemsize
    waiting, reducing = 0, 0
    copying: deque[int] = deque(maxlen=max_copying)
    for index in range(len(loads) - 1, -1, -1):
        load = loads[index]
        ahead = loads[index - 1].num_params if index > 1 and stage == 3 else 0
        own = 0 if index == 0 or stage < 3 else 2 * load.num_params
        trained = load.shard_numel * num_shards
        gathered = base + itemsize * (own + ahead)
        work = kept + load.work_bytes
        grads = itemsize * (waiting + sum(copying))
        moments.append(Peak(f"backward of {load.name}", grads, gathered + reducing + itemsize * trained, work))
        kept -= load.kept_bytes
        reducing = 4 * trained
        buffers = gathered + itemsize * trained + reducing + 4 * load.shard_numel
        moments.append(Peak(f"reduction of {load.name}", grads, buffers, kept))
        if waits[index]:
            waiting += load.shard_numel
        else:
            copying.append(load.shard_numel)
    return max(moments, key=lambda peak: peak.num_bytes)
