"""When each rank of this machine died. torch's agent looks ten times a second and notes whole seconds.

A rank that a signal ends tells nobody. The launcher ends the others by SIGTERM as soon as it has seen one fail, so
where somebody else's SIGTERM ended a rank only the times say which it was. Linux; elsewhere nothing is known.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from pathlib import Path

_LOOK_S = 0.05


class DeathWatch:
    """Notes the ends of ranks while the context is open; whoever started them waits for them."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        """`folder`: where ranks leave their process ids (`leave_pid`)."""
        self._folder = folder
        self._num_ranks = num_ranks
        self._known: set[int] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="deaths", daemon=True)
        self.seconds: dict[int, float] = {}
        """Local rank -> when its process ended, in seconds since 1970, of those that have."""

    def __enter__(self) -> DeathWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        self._thread.join()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            while not self._closed and len(self.seconds) < self._num_ranks:
                ended = self._ended(selector, _LOOK_S)
                # A rank that came and died while this thread waited is found only by another look; it may have been the
                # first, and the one that was waited for ended for its sake.
                while ended and (more := self._ended(selector, 0)):
                    ended += more
                # one look, one time: it does not tell which of them was first
                self.seconds.update(dict.fromkeys(ended, time.time()))
            for key in list(selector.get_map().values()):
                os.close(key.fd)

    def _ended(self, selector: selectors.BaseSelector, seconds: float) -> list[int]:
        """The ranks whose end is seen now, or within `seconds` if none is."""
        ended = self._look_for_ranks(selector)
        for key, _ in selector.select(0 if ended else seconds):
            selector.unregister(key.fd)
            os.close(key.fd)
            ended.append(key.data)
        return ended

    def _look_for_ranks(self, selector: selectors.BaseSelector) -> list[int]:
        """Returns those that are gone already."""
        gone: list[int] = []
        if len(self._known) == self._num_ranks:
            return gone
        for file in self._folder.glob("pid.*"):
            local_rank = int(file.suffix[1:])
            if local_rank in self._known:
                continue
            self._known.add(local_rank)
            try:
                # becomes readable with the end of the process, waited for or not
                selector.register(
                    os.pidfd_open(int(file.read_text(encoding="utf-8"))), selectors.EVENT_READ, local_rank
                )
            except ProcessLookupError:
                gone.append(local_rank)
            except OSError:  # a kernel before 5.3, or a container that forbids it
                pass
        return gone


def leave_pid(folder: Path, local_rank: int) -> None:
    """In a rank: tells the launcher which process this is."""
    name = f"pid.{local_rank}"
    try:
        (folder / f".{name}").write_text(str(os.getpid()), encoding="utf-8")
        (folder / f".{name}").rename(folder / name)
    except OSError:
        pass  # its end is then seen by torch's agent alone
