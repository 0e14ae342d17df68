"""What the ranks write: passed on as it comes, with the end of each rank's stderr kept to be shown when it fails.

The launcher makes one named pipe per rank, and `heavylift.launch.entry` puts it in the place of stderr: what a
process that dies without a word (a signal, an abort in C++) wrote last is then in the pipe, not lost. On a terminal
the pipes are pseudo-terminals, so that progress bars and colours stay. With `--enable_each_rank_log` stdout and
stderr of a rank go to a file instead, and the end is read from there.
"""

from __future__ import annotations

import os
import re
import selectors
import termios
import threading
from pathlib import Path

PIPES_VARIABLE = "HEAVYLIFT_STDERR_PIPES"
"""Folder of the named pipes."""
LOG_VARIABLE = "HEAVYLIFT_RANK_LOG"
"""Start of the path of a rank's log file; the rank and `.log` follow."""
_KEPT_BYTES = 16384
_CHUNK_BYTES = 65536


def worker_redirect() -> None:
    """In a worker: sends fd 2, or 1 and 2, where the launcher wants them. Without a launcher nothing happens."""
    if (prefix := os.environ.get(LOG_VARIABLE)) is not None:
        file = os.open(log_file(prefix, int(os.environ["RANK"])), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
    elif (folder := os.environ.pop(PIPES_VARIABLE, None)) is not None:
        pipe = os.open(_pipe(folder, int(os.environ["LOCAL_RANK"])), os.O_WRONLY | os.O_NOCTTY)
        os.dup2(pipe, 2)
        os.close(pipe)


def log_file(prefix: str, rank: int) -> str:
    """The log file of a rank."""
    return f"{prefix}_rank{rank}.log"


def last_lines(written: bytes, num_lines: int) -> list[str]:
    """The last lines with something in them; of a line that was drawn over (a progress bar) the last state."""
    lines = written.decode(errors="replace").split("\n")
    shown = [re.split(r"\r(?!$)", line.rstrip("\r"))[-1].rstrip() for line in lines]
    return [line for line in shown if line][-num_lines:]


def end_of_file(path: str) -> bytes:
    """The last bytes of a file, empty if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _KEPT_BYTES))
            return file.read()
    except OSError:
        return b""


class RankStderr:
    """The launcher's side of the ranks' stderr pipes. Use as a context: a thread passes on what arrives."""

    def __init__(self, folder: str, num_ranks: int, target: int = 2) -> None:
        """Makes the pipes in `folder`. `target`: file descriptor that everything is passed on to."""
        self.folder = folder
        self._target = target
        self._kept = [b""] * num_ranks
        self._kept_open: list[int] = []
        make = self._make_terminal if os.isatty(target) else self._make_fifo
        self._pipes = [make(_pipe(folder, rank)) for rank in range(num_ranks)]
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._pass_on, name="rank-stderr", daemon=True)

    def __enter__(self) -> RankStderr:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Passes on what is still there and ends; `end` works on. A second call does nothing."""
        if not self._pipes:
            return
        os.close(self._stop_write)
        self._thread.join()
        for rank in range(len(self._pipes)):
            while self._read(rank):
                pass
        for descriptor in (*self._pipes, *self._kept_open, self._stop_read):
            os.close(descriptor)
        self._pipes = []

    def end(self, local_rank: int) -> bytes:
        """The last bytes that this rank wrote."""
        return self._kept[local_rank]

    def _make_fifo(self, path: Path) -> int:
        os.mkfifo(path, 0o600)
        # opened for writing too: such a pipe never ends while ranks come and go
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def _make_terminal(self, path: Path) -> int:
        ours, theirs = os.openpty()
        attributes = termios.tcgetattr(theirs)
        attributes[1] &= ~termios.OPOST  # the real terminal turns line ends into its own already
        termios.tcsetattr(theirs, termios.TCSANOW, attributes)
        termios.tcsetwinsize(theirs, termios.tcgetwinsize(self._target))
        path.symlink_to(os.ttyname(theirs))
        self._kept_open.append(theirs)  # as long as it is open, reading never ends
        os.set_blocking(ours, False)
        return ours

    def _pass_on(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop_read, selectors.EVENT_READ, None)
            for rank, pipe in enumerate(self._pipes):
                selector.register(pipe, selectors.EVENT_READ, rank)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    self._read(key.data)

    def _read(self, rank: int) -> bool:
        try:
            chunk = os.read(self._pipes[rank], _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._kept[rank] = (self._kept[rank] + chunk)[-_KEPT_BYTES:]
        self._pass(rank, chunk)
        return bool(chunk)

    def _pass(self, rank: int, chunk: bytes) -> None:
        try:
            written = 0
            while written < len(chunk):
                written += os.write(self._target, chunk[written:])
        except OSError:  # our own stderr is gone: the ranks must not stand still for that
            pass


def _pipe(folder: str, local_rank: int) -> Path:
    return Path(folder) / f"stderr.{local_rank}"
