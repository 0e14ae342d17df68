"""The tokenised data set in memory: flat arrays, no torch; and the one source of random order.

`SampleSet` is what tokenising makes and what batches are cut from. It does not know where it came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from heavylift.config.words import counted
from heavylift.data.report import DataReport
from heavylift.errors import UserError

# keeps the streams of different uses apart under one seed
STREAM_SPLIT, STREAM_EPOCH, STREAM_RANDOM_TOKENS = 1, 2, 3


def raw_bits(num: int, seed: int, *stream: int) -> np.ndarray:
    """`num` random uint64 that depend on `seed` (any integer) and `stream` only.

    Raw bit-generator output: NumPy promises it for all versions, which it does not for `permutation` or `integers`
    (NEP 19), so the order of a run can be reproduced later.
    """
    entropy = np.random.SeedSequence([seed % 2**64, *stream])
    return np.random.PCG64(entropy).random_raw(num)


def permutation(num: int, seed: int, *stream: int) -> np.ndarray:
    """A random order of `range(num)`, int64 [num]; the same for the same arguments, everywhere."""
    return np.argsort(raw_bits(num, seed, *stream), kind="stable")


@dataclass(frozen=True)
class SampleSet:
    """Samples, concatenated: sample i is `[offsets[i], offsets[i + 1])` of `tokens` and `trained`."""

    tokens: np.ndarray
    """int32 [total]: token ids."""
    trained: np.ndarray
    """bool [total]: is this token predicted with a loss? Never true for the first token of a sample."""
    offsets: np.ndarray
    """int64 [num + 1]: begins with 0, ends with total."""
    report: DataReport = field(compare=False)
    """What happened to the rows on the way here."""
    lengths: np.ndarray = field(init=False, repr=False, compare=False)
    """int64 [num]: tokens per sample."""
    trained_lengths: np.ndarray = field(init=False, repr=False, compare=False)
    """int64 [num]: trained tokens per sample."""

    def __post_init__(self) -> None:
        total = len(self.tokens)
        assert self.tokens.dtype == np.int32, self.tokens.dtype
        assert self.trained.dtype == np.bool_ and len(self.trained) == total, (self.trained.dtype, total)
        assert self.offsets.dtype == np.int64 and self.offsets[0] == 0 and self.offsets[-1] == total, self.offsets
        lengths = np.diff(self.offsets)
        assert (lengths > 0).all(), "empty sample"
        assert not self.trained[self.offsets[:-1]].any(), "the first token of a sample cannot be predicted"
        trained_before = np.concatenate(([0], np.cumsum(self.trained, dtype=np.int64)))
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "trained_lengths", np.diff(trained_before[self.offsets]))

    @classmethod
    def from_lists(cls, samples: Sequence[tuple[Sequence[int], Sequence[bool]]], report: DataReport) -> SampleSet:
        """Concatenates (token ids, trained) pairs of equal length."""
        lengths = [len(ids) for ids, _ in samples]
        tokens = np.fromiter((t for ids, _ in samples for t in ids), np.int32, sum(lengths))
        trained = np.fromiter((t for _, mask in samples for t in mask), np.bool_, sum(lengths))
        return cls(tokens, trained, np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int64), report)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (int32 [length]) and trained marks (bool [length]) of one sample, as views."""
        assert 0 <= index < len(self), (index, len(self))
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.tokens[part], self.trained[part]

    def length(self, index: int) -> int:
        """Tokens of one sample."""
        return int(self.lengths[index])

    def num_trained_tokens(self, index: int) -> int:
        """Trained tokens of one sample."""
        return int(self.trained_lengths[index])

    def subset(self, indices: np.ndarray) -> SampleSet:
        """The samples `indices` (int [k]), in that order, copied. The report stays that of the whole."""
        lengths = self.lengths[indices]
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        # position inside the new sample, plus where the sample begins in the old array
        where = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][indices] - offsets[:-1], lengths)
        return SampleSet(self.tokens[where], self.trained[where], offsets, self.report)

    def split(self, val_size: float, seed: int) -> tuple[SampleSet, SampleSet]:
        """(train, validation): disjoint, together everything, the same for the same seed; both in file order.

        `val_size` as in the recipe: a share below 1 (rounded, at least one sample), or a number of samples; 0 holds
        out nothing. Raises UserError if nothing is left to train on.
        """
        num_val = int(val_size) if val_size >= 1 else round(val_size * len(self))
        if val_size > 0:
            num_val = max(1, num_val)
        if num_val and num_val >= len(self):
            raise UserError(
                f"data.val_size: {val_size:g} holds out {num_val} of {counted(len(self), 'sample')}, nothing is left "
                "to train on; lower data.val_size or add data"
            )
        order = permutation(len(self), seed, STREAM_SPLIT)
        return self.subset(np.sort(order[num_val:])), self.subset(np.sort(order[:num_val]))
