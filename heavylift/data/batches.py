"""Which samples go where: a plan that every process computes for itself, without asking the others.

The samples of step k follow from (seed, k) and the global batch size alone, so one process that accumulates four
micro-batches sees the same step as four processes with one each, and a run resumes from the step number. Every
process always has the same number of micro-batches; missing samples are filled with rows of weight zero.
Left out: packing several samples in a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from heavylift.config.words import counted
from heavylift.data.samples import STREAM_EPOCH, SampleSet, permutation
from heavylift.errors import UserError

IGNORE = -100
"""Label of a position without loss (the default `ignore_index` of PyTorch's cross entropy)."""
PAD = 0
"""Token id in padding: any valid one does, as nothing that counts can see it."""
_FILL = -1  # in place of a sample index: nothing is left for this row


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B rows and S positions, padded on the right; the labels are shifted already.

    There is no attention mask: a causal model never lets a position see what is to its right, so no real token sees
    a pad, and what pads see has no label.
    """

    input_ids: torch.Tensor
    """int64 [B, S]"""
    labels: torch.Tensor
    """int64 [B, S]: the token to predict AT position t, i.e. `input_ids[:, t + 1]` where that is trained, else
    `IGNORE`; so compare with the logits position by position. The last position is always `IGNORE`."""
    num_tokens: int
    """Real tokens, pads not counted."""
    num_trained_tokens: int
    """Labels that are not `IGNORE`; 0 in a micro-batch that only keeps step."""


class BatchPlan:
    """Steps of `micro_batch_size * accumulation * world_size` samples, the last one of an epoch perhaps smaller.

    `seed=None` is for evaluation: file order, and fewer samples than processes are fine. With a seed every epoch has
    its own order; UserError if there are fewer samples than processes.
    """

    def __init__(
        self,
        samples: SampleSet,
        micro_batch_size: int,
        accumulation: int,
        world_size: int,
        seed: int | None,
        pad_to_multiple_of: int = 8,
    ) -> None:
        for number in (len(samples), micro_batch_size, accumulation, world_size, pad_to_multiple_of):
            assert number >= 1, (len(samples), micro_batch_size, accumulation, world_size, pad_to_multiple_of)
        if seed is not None and len(samples) < world_size:
            raise UserError(
                f"more processes than data: {world_size} processes share {counted(len(samples), 'sample')}; "
                "lower launch.nproc, or add data (or lower data.val_size)"
            )
        self.samples = samples
        self.micro_batch_size = micro_batch_size
        self.accumulation = accumulation
        self.world_size = world_size
        self.seed = seed
        self.pad_to_multiple_of = pad_to_multiple_of
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step, over all processes and micro-batches."""
        return self.micro_batch_size * self.accumulation * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the data."""
        return math.ceil(len(self.samples) / self.global_batch_size)

    @property
    def longest(self) -> int:
        """Positions of the widest micro-batch that can occur, padding included."""
        return self._padded(int(self.samples.lengths.max()))

    def num_steps(self, num_epochs: float, max_steps: int | None = None) -> int:
        """Steps of the whole run: `max_steps` if given, else `num_epochs` rounded up to whole steps."""
        if max_steps is not None:
            return max_steps
        # the small number takes out the rounding of e.g. 0.1 * 30
        return max(1, math.ceil(num_epochs * self.steps_per_epoch - 1e-9))

    def sample_ids(self, step: int) -> np.ndarray:
        """Indices of the samples of one step over all processes, int64 [<= global_batch_size]; `step` is 0-based."""
        assert step >= 0, step
        epoch, position = divmod(step, self.steps_per_epoch)
        return self._epoch_order(epoch)[position * self.global_batch_size :][: self.global_batch_size]

    def num_tokens(self, step: int) -> int:
        """Real tokens of a step over all processes and micro-batches."""
        return int(self.samples.lengths[self.sample_ids(step)].sum())

    def num_trained_tokens(self, step: int) -> int:
        """Tokens with a loss of a step over all processes and micro-batches: what its loss is divided by."""
        return int(self.samples.trained_lengths[self.sample_ids(step)].sum())

    def micro_batches(self, step: int, rank: int) -> list[Batch]:
        """The `accumulation` micro-batches of one process. Some can be without any sample, none is missing."""
        assert 0 <= rank < self.world_size, (rank, self.world_size)
        return [self._batch(row) for row in self._places(step)[:, rank]]

    def _places(self, step: int) -> np.ndarray:
        """Sample index or `_FILL` for each place of a step, int64 [accumulation, world_size, micro_batch_size].

        Filled in the order micro-batch, rank, so that a small last step keeps as many processes busy as it can.
        """
        places = np.full(self.global_batch_size, _FILL, np.int64)
        ids = self.sample_ids(step)
        places[: len(ids)] = ids
        return places.reshape(self.accumulation, self.world_size, self.micro_batch_size)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self.seed is None:
            return np.arange(len(self.samples))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, permutation(len(self.samples), self.seed, STREAM_EPOCH, epoch))
        return self._order[1]

    def _padded(self, length: int) -> int:
        return -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of

    def _batch(self, row: np.ndarray) -> Batch:
        """The samples `row` (int64 [micro_batch_size], `_FILL` for none) as tensors."""
        real = [self.samples.sample(int(index)) for index in row if index != _FILL]
        width = self._padded(max((len(ids) for ids, _ in real), default=1))
        input_ids = np.full((len(row), width), PAD, np.int64)
        labels = np.full((len(row), width), IGNORE, np.int64)
        for b, (ids, trained) in enumerate(real):
            input_ids[b, : len(ids)] = ids
            labels[b, : len(ids) - 1] = np.where(trained[1:], ids[1:], IGNORE)
        return Batch(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            num_tokens=sum(len(ids) for ids, _ in real),
            num_trained_tokens=int(np.count_nonzero(labels != IGNORE)),
        )


def evaluation_plan(
    samples: SampleSet, micro_batch_size: int, world_size: int, pad_to_multiple_of: int = 8
) -> BatchPlan:
    """One pass in file order: evaluate steps `range(plan.steps_per_epoch)`, each one micro-batch per process."""
    return BatchPlan(samples, micro_batch_size, 1, world_size, seed=None, pad_to_multiple_of=pad_to_multiple_of)
