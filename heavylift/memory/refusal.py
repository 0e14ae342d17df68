"""Host memory that the plan found free and that the host refuses all the same: said in one line.

A limit that no free memory shows (`ulimit -l` for page-locked memory, `ulimit -v`, strict overcommit) is met only when
memory is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from heavylift.errors import UserError


@contextmanager
def host_memory_for(what: str, key: str, instead: str) -> Iterator[None]:
    """Raises UserError where the host refuses memory inside (MemoryError, as of `heavylift.offload.tiers.HostSlab`).

    `what` the memory is for, the configuration's `key` that asks for it, `instead`: what to change.
    """
    try:
        yield
    except MemoryError as error:
        raise UserError(f"{key}: host memory for {what}: {error}; {instead}") from None
