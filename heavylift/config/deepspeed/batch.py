"""The batch equation: rows per step = rows per micro-batch x accumulation x ranks, solved for what is not given."""

from __future__ import annotations

from heavylift.config.deepspeed.settings import BatchSizes

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


def solve_batch(
    train: int | None, micro: int | None, accumulation: int | None, world_size: int
) -> tuple[BatchSizes | None, str | None]:
    """The three sizes, from any two of them, or from one (accumulation is then 1). A None is unknown.

    Returns (sizes, None), or (None, what is wrong: the equation with every number and where it came from).
    The rules are DeepSpeed's: accumulation alone is not enough.
    """
    assert world_size >= 1, f"{world_size=}"
    if train is None and micro is None:
        given = f"only {ACCUMULATION}" if accumulation is not None else "none of its keys"
        return None, f"{TRAIN}: {given} is given; expected {TRAIN} or {MICRO}"
    if micro is not None:
        solved = _from_micro(train, micro, accumulation, world_size)
    else:
        assert train is not None
        rest = (accumulation or 1) * world_size
        solved = BatchSizes(train, train // rest, accumulation or 1) if train % rest == 0 else None
    if solved is not None:
        return solved, None
    return None, (
        f"{TRAIN}: expected {TRAIN} = {MICRO} * {ACCUMULATION} * world size, got "
        f"{_said(train)} = {_said(micro)} * {_said(accumulation, micro is None)} * {world_size} (launcher); "
        f"{_remedy(train, micro, accumulation, world_size)}"
    )


def _from_micro(train: int | None, micro: int, accumulation: int | None, world_size: int) -> BatchSizes | None:
    if train is None:
        accumulation = accumulation or 1
        return BatchSizes(micro * accumulation * world_size, micro, accumulation)
    if accumulation is None:
        if train % (micro * world_size):
            return None
        accumulation = train // (micro * world_size)
    if train != micro * accumulation * world_size:
        return None
    return BatchSizes(train, micro, accumulation)


def _said(value: int | None, is_default: bool = False) -> str:
    if value is None:
        return "1 (default)" if is_default else "? (not given)"
    return f"{value} (file)"


def _remedy(train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> str:
    assert train is not None  # without it every equation has a solution
    if micro is not None and accumulation is not None:
        return f"change {TRAIN} to {micro * accumulation * world_size}, or remove one of the three"
    known = (micro or accumulation or 1) * world_size
    missing = ACCUMULATION if micro is not None else MICRO
    near = max(1, round(train / known)) * known
    return f"no whole {missing} solves it; change {TRAIN} to a multiple of {known}, such as {near}"
