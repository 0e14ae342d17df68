"""A played CUDA driver: copies and events on streams that come to them late, as a GPU does.

The functions have the types of native/pieces.h. "Device" memory is memory of the host. What is issued only waits in its
stream; each look at an event lets one stream do one thing, mostly the one that copies down. So what is overwritten too
early, or read before it is there, gives wrong numbers here.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from heavylift.offload.cuda_driver import Driver

NOT_READY = 600
DOWN, UP = 77, 78
"""Handles of the two streams."""


@dataclass(eq=False)
class PlayedEvent:
    """What stands for a `torch.cuda.Event`."""

    cuda_event: int
    num_recorded: int = 0
    num_reached: int = 0


@dataclass
class PlayedDriver:
    """The functions, and what they were asked."""

    events: dict[int, PlayedEvent] = field(default_factory=dict)
    copies: list[tuple[str, int, int, int]] = field(default_factory=list)
    """("down" or "up", address on the device, address on the host, bytes), as issued."""
    fails_at: int = -1
    """The copy, counted from 0, that is refused with error 201."""
    stands_still: bool = False
    """Nothing that is issued ever happens."""

    def __post_init__(self) -> None:
        self._streams: dict[int, deque[Callable[[], bool]]] = {DOWN: deque(), UP: deque()}
        self._turn = 0
        number, pointer, size = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t
        types = [
            (self._copy_down, (pointer, number, size, pointer)),
            (self._copy_up, (number, pointer, size, pointer)),
            (self._record, (pointer, pointer)),
            (self._query, (pointer,)),
            (self._wait, (pointer, pointer, ctypes.c_uint)),
        ]
        self._functions = [ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(function) for function, arguments in types]
        self.driver = Driver(*(ctypes.cast(function, pointer).value for function in self._functions))

    def event(self) -> PlayedEvent:
        """A new one."""
        event = PlayedEvent(1000 + len(self.events))
        self.events[event.cuda_event] = event
        return event

    def _issue(self, stream: int, act: Callable[[], None]) -> int:
        def done() -> bool:
            act()
            return True

        self._streams[stream].append(done)
        return 0

    def _copy(self, kind: str, device: int, host: int, size: int, stream: int) -> int:
        self.copies.append((kind, device, host, size))
        if len(self.copies) - 1 == self.fails_at:
            return 201
        target, source = (host, device) if kind == "down" else (device, host)
        return self._issue(stream, lambda: ctypes.memmove(target, source, size) and None)

    def _copy_down(self, host: int, device: int, size: int, stream: int) -> int:
        return self._copy("down", device, host, size, stream)

    def _copy_up(self, device: int, host: int, size: int, stream: int) -> int:
        return self._copy("up", device, host, size, stream)

    def _record(self, event: int, stream: int) -> int:
        played = self.events[event]
        played.num_recorded += 1
        number = played.num_recorded

        def reach() -> None:
            played.num_reached = number

        return self._issue(stream, reach)

    def _wait(self, stream: int, event: int, flags: int) -> int:
        played = self.events[event]
        number = played.num_recorded
        self._streams[stream].append(lambda: played.num_reached >= number)
        return 0

    def _query(self, event: int) -> int:
        self._turn += 1
        stream = self._streams[UP if self._turn % 8 == 0 else DOWN]
        if stream and not self.stands_still and stream[0]():
            stream.popleft()
        played = self.events[event]
        return 0 if played.num_reached == played.num_recorded else NOT_READY

    def synchronize(self) -> None:
        """Lets the streams do all that is left."""
        while any(self._streams.values()):
            before = sum(map(len, self._streams.values()))
            for stream in self._streams.values():
                if stream and stream[0]():
                    stream.popleft()
            assert sum(map(len, self._streams.values())) < before, "two streams wait for each other"
