"""User errors of several machines, said once: each machine's launcher hands them to the launcher that started it.

They go up as marked lines on stderr, which ssh and srun carry anyway. Everything else on stderr passes as it comes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from heavylift.launch.failures import Told
from heavylift.launch.rank_output import RankStderr

_MARK = b"\x1eheavylift user error "


def hand_up(told: Sequence[Told]) -> None:
    """In a launcher that another one has started: the ranks' user errors, for that one to say."""
    for note in told:
        if note.lines:
            os.write(2, _MARK + json.dumps([note.rank, note.seconds, note.code, note.lines]).encode() + b"\n")


class NodeStderr(RankStderr):
    """The stderr of every node's launcher (of the ssh or srun that runs it); `told` is what was handed up."""

    def __init__(self, folder: str, num_nodes: int) -> None:
        super().__init__(folder, num_nodes)
        self.told: list[Told] = []
        self.nodes: set[int] = set()
        """Those whose launcher has handed something up."""
        self._held = [b""] * num_nodes
        """The end of what came so far, where a mark begins in it."""

    @contextmanager
    def writing_end(self, node: int) -> Iterator[int]:
        """The file descriptor that this node's process gets as stderr."""
        end = os.open(Path(self.folder) / f"stderr.{node}", os.O_WRONLY | os.O_NOCTTY)
        try:
            yield end
        finally:
            os.close(end)

    def close(self) -> None:
        """As of ranks; a marked line without an end is passed on."""
        super().close()
        for node, held in enumerate(self._held):
            self._held[node] = b""
            super()._pass(node, held)

    def _pass(self, rank: int, chunk: bytes) -> None:
        rest, passed = self._held[rank] + chunk, b""
        while (start := rest.find(_MARK)) >= 0 and (end := rest.find(b"\n", start)) >= 0:
            passed += rest[:start]
            number, seconds, code, lines = json.loads(rest[start + len(_MARK) : end])
            self.nodes.add(rank)
            self.told.append(Told(number, seconds, code, tuple(lines)))
            rest = rest[end + 1 :]
        if start < 0:
            start = rest.rfind(_MARK[:1])
            start = start if start >= 0 and _MARK.startswith(rest[start:]) else len(rest)
        self._held[rank] = rest[start:]
        super()._pass(rank, passed + rest[:start])
