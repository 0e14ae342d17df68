"""Optimizer states of a group on their tiers: master, exp_avg, exp_avg_sq, flat, stored as `formats` says.

A group's flat layout is cut at most once: its front part lies on the device tier, the rest on the host tier. Each part
is stepped where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from heavylift.config.schema import StateFormat, Tier
from heavylift.offload.formats import STORED_DTYPES, join_masters, low_halves, mark_signs_, rounds_up
from heavylift.offload.groups import Group, Segment
from heavylift.offload.noise import noise_of
from heavylift.offload.quantised import BLOCK, GRIDS, block_pieces, block_scales, decode, encode, num_blocks
from heavylift.offload.tensors import MOMENTS, StepTensors
from heavylift.offload.tiers import HostSlab, TierUsage, aligned_bytes, choose_streamed

STATE_NAMES = ("master", *MOMENTS)
PIECE_NUMEL = 2**22
"""Elements that are converted at a time when states are read or written from outside: temporaries of 20 to 80 MB."""
assert PIECE_NUMEL % BLOCK == 0


@dataclass(eq=False)
class Part:
    """The range [start, stop) of a group's flat layout, with its states on one tier."""

    group: Group
    tier: Tier
    start: int
    stop: int
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    accumulator: torch.Tensor | None
    """Sum of the reduced gradients of the micro-batches, float32; None without gradient accumulation."""
    state_format: StateFormat = StateFormat.FP32
    """How the three states are stored; `read` and `write` know."""
    scales: tuple[torch.Tensor, torch.Tensor] | None = None
    """Of the moments' blocks, segment after segment; None with formats other than `int8`."""
    blocks: dict[Segment, slice] = field(init=False)
    """Where the scales of each segment lie. A block never reaches into another segment, which may step at another time.
    """

    streamed: bool = False
    """A host part that the GPU steps: its states go up and come home, and their memory is page-locked."""
    home_event: torch.cuda.Event | None = None
    """Behind the last copy home of a streamed part."""

    def __post_init__(self) -> None:
        laid_out = block_pieces(self.group.segment_numels, self.start, self.stop)
        self.blocks = {}
        for segment, piece in zip(self.group.segments, laid_out, strict=True):
            where = self.overlap(segment)  # without padding
            used = 0 if where is None else num_blocks(where.stop - where.start)
            self.blocks[segment] = slice(piece.start, piece.start + used)

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return self.stop - self.start

    def stored(self) -> list[torch.Tensor]:
        """Everything that is kept between steps, flat [numel] each: the states and, where there is one, the accumulator
        at the end."""
        return [self.master, self.exp_avg, self.exp_avg_sq, *([] if self.accumulator is None else [self.accumulator])]

    def wait_until_home(self) -> None:
        """Blocks until a streamed part's memory holds the last step: before anything but a stream touches it."""
        if self.home_event is not None:
            self.home_event.synchronize()

    def overlap(self, segment: Segment) -> slice | None:
        """Where `segment` lies in this part's own tensors, None if it does not."""
        start, stop = max(segment.start, self.start), min(segment.stop, self.stop)
        return slice(start - self.start, stop - self.start) if start < stop else None

    def overlap_in_segment(self, segment: Segment) -> slice:
        """The same range, counted from the start of the segment."""
        where = self.overlap(segment)
        assert where is not None, f"{segment.name} does not reach into [{self.start}, {self.stop})"
        offset = self.start - segment.start
        return slice(where.start + offset, where.stop + offset)

    def step_tensors(
        self, where: slice, grad: torch.Tensor, param_out: torch.Tensor | None, first: Segment, step: int
    ) -> StepTensors:
        """The states of a range of the part beside its gradient and where the new parameters go, flat and as long.

        `first`: the segment that lies at the beginning of the range (in formats that round all over it); `step`: its
        count."""
        states = self.master[where], self.exp_avg[where], self.exp_avg_sq[where]
        noise = scales = None
        if not self.state_format.is_exact:
            noise = noise_of(first.name, step, first.first + self.start + where.start - first.start)
        if self.scales is not None:
            assert where == self.overlap(first), f"{where} is not the whole of {first.name} in this part"
            scales = self._scales_of(first, "exp_avg"), self._scales_of(first, "exp_avg_sq")
        return StepTensors(*states, grad, param_out, self.state_format, noise, scales)

    def read(self, name: str, segment: Segment) -> torch.Tensor:
        """A state of the segment's range in this part, float32, on the part's tier: a view where it is stored so."""
        where = self.overlap(segment)
        assert where is not None, f"{segment.name} does not reach into [{self.start}, {self.stop})"
        self.wait_until_home()
        stored = self._stored(name)[where]
        if self.state_format is StateFormat.SPLIT and name == "exp_avg_sq":
            return stored.abs()
        joined = self.state_format is StateFormat.SPLIT and name == "master"
        if not joined and not (self.state_format is StateFormat.INT8 and name in MOMENTS):
            return stored.float()
        values = torch.empty(stored.numel(), dtype=torch.float32, device=stored.device)
        for piece in _pieces(stored.numel()):
            if joined:
                param = segment.shard()[self.overlap_in_segment(segment)][piece].to(stored.device)
                values[piece] = join_masters(param, stored[piece], self.exp_avg_sq[where][piece])
            else:
                scales = self._scales_of(segment, name)[_blocks_of(piece)]
                values[piece] = decode(stored[piece], scales, GRIDS[name])
        return values

    def write(self, name: str, segment: Segment, values: torch.Tensor) -> None:
        """Sets a state from `values`: the whole shard of the segment, flat, any float dtype and device. Who sets a
        master sets the parameter to its rounded value too."""
        where = self.overlap(segment)
        if where is None:
            return
        self.wait_until_home()
        if self.state_format is StateFormat.SPLIT and name == "master" and values.dtype is torch.bfloat16:
            # nothing is below a bfloat16, and nothing has been rounded up: a start reads every parameter
            self.master[where].zero_()
            self.exp_avg_sq[where].abs_()
            return
        stored, new = self._stored(name)[where], values[self.overlap_in_segment(segment)]
        for piece in _pieces(stored.numel()):
            self._write_piece(name, segment, piece, new[piece].to(stored.device, torch.float32))

    def _write_piece(self, name: str, segment: Segment, piece: slice, new: torch.Tensor) -> None:
        where = self.overlap(segment)
        assert where is not None
        stored = self._stored(name)[where][piece]
        if self.state_format is StateFormat.SPLIT and name == "master":
            stored.copy_(low_halves(new))
            mark_signs_(self.exp_avg_sq[where][piece], rounds_up(new, new.to(torch.bfloat16)))
        elif self.state_format is StateFormat.SPLIT and name == "exp_avg_sq":
            stored.copy_(torch.copysign(new, stored))
        elif self.state_format is StateFormat.INT8 and name in MOMENTS:
            scales = self._scales_of(segment, name)[_blocks_of(piece)].copy_(block_scales(new))
            stored.copy_(encode(new, scales, GRIDS[name], None))
        else:
            stored.copy_(new)

    def _stored(self, name: str) -> torch.Tensor:
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}[name]

    def _scales_of(self, segment: Segment, name: str) -> torch.Tensor:
        assert self.scales is not None, f"{self.state_format} states have no scales"
        return self.scales[MOMENTS.index(name)][self.blocks[segment]]

    def read_master(self, segment: Segment) -> None:
        """Sets the master from the parameter: after loading weights, or whenever somebody else wrote them."""
        self.write("master", segment, segment.shard())


def _pieces(numel: int) -> Iterator[slice]:
    """Of a segment's range, one at a time: the temporaries of a head with a billion parameters would take more than a
    plan leaves free."""
    for start in range(0, numel, PIECE_NUMEL):
        yield slice(start, min(start + PIECE_NUMEL, numel))


def _blocks_of(piece: slice) -> slice:
    """The blocks of a piece of a segment, which begins with one."""
    return slice(piece.start // BLOCK, num_blocks(piece.stop))


@dataclass(frozen=True)
class PartLayout:
    """The tensors of a part: how many elements, of what dtype."""

    states: tuple[tuple[int, torch.dtype], ...]
    """Master, exp_avg, exp_avg_sq."""
    scales: tuple[tuple[int, torch.dtype], ...]
    accumulator: tuple[tuple[int, torch.dtype], ...]

    @property
    def tensors(self) -> tuple[tuple[int, torch.dtype], ...]:
        """All of them, in the order in which they are allocated."""
        return self.states + self.scales + self.accumulator

    @property
    def device_bytes(self) -> int:
        """What they take on the device."""
        return sum(numel * dtype.itemsize for numel, dtype in self.tensors)

    @property
    def host_bytes(self) -> int:
        """What they take of a slab on the host."""
        return sum(aligned_bytes(numel, dtype) for numel, dtype in self.tensors)


def kept_dtypes(accumulate: bool, state_format: StateFormat) -> list[torch.dtype]:
    """Of the tensors of `Part.stored`, in their order."""
    return [*STORED_DTYPES[state_format], *([torch.float32] if accumulate else [])]


def part_layout(
    segment_numels: Sequence[int], start: int, stop: int, accumulate: bool, state_format: StateFormat
) -> PartLayout:
    """Of the range [start, stop) of a group's flat layout. `segment_numels`: elements of each of the group's segments,
    padding included. Nothing where the range is empty."""
    if start == stop:
        return PartLayout((), (), ())
    states = tuple((stop - start, dtype) for dtype in STORED_DTYPES[state_format])
    scales: tuple[tuple[int, torch.dtype], ...] = ()
    if state_format is StateFormat.INT8:
        scales = ((block_pieces(segment_numels, start, stop)[-1].stop, torch.float32),) * 2
    return PartLayout(states, scales, ((stop - start, torch.float32),) if accumulate else ())


def allocate_parts(
    groups: Sequence[Group],
    device_numels: Sequence[int],
    accumulate: bool,
    usage: TierUsage,
    state_format: StateFormat = StateFormat.FP32,
    streamed_share: float = 0.0,
) -> tuple[list[list[Part]], list[HostSlab]]:
    """Allocates and initialises the states: for each group its parts. The host states that the CPU steps share one
    slab (not page-locked: only staging is copied over the bus), those that are streamed another, page-locked one."""
    chosen = choose_streamed([g.numel - cut for g, cut in zip(groups, device_numels, strict=True)], streamed_share)
    host_bytes = {False: 0, True: 0}
    for group, cut, streamed in zip(groups, device_numels, chosen, strict=True):
        layout = part_layout(group.segment_numels, cut, group.numel, accumulate, state_format)
        host_bytes[streamed] += layout.host_bytes
    on_gpu = any(group.device.type == "cuda" for group in groups)
    slabs = {
        streamed: HostSlab(num_bytes, pinned=streamed and on_gpu, usage=usage)
        for streamed, num_bytes in host_bytes.items()
        if num_bytes
    }
    result = []
    for group, cut, streamed in zip(groups, device_numels, chosen, strict=True):
        parts = []
        for tier, start, stop in ((Tier.DEVICE, 0, cut), (Tier.HOST, cut, group.numel)):
            layout = part_layout(group.segment_numels, start, stop, accumulate, state_format)
            if not layout.tensors:
                continue
            if tier is Tier.HOST:
                tensors = [slabs[streamed].take(numel, dtype) for numel, dtype in layout.tensors]
            else:
                tensors = [torch.zeros(numel, dtype=dtype, device=group.device) for numel, dtype in layout.tensors]
                usage.device_bytes += layout.device_bytes
            # touch every page now: memory that is not there must fail before training, not at the first step
            for tensor in tensors:
                tensor.zero_()
            parts.append(_make_part(group, tier, start, stop, tensors, state_format, layout))
            parts[-1].streamed = streamed and tier is Tier.HOST
        result.append(parts)
    return result, list(slabs.values())


def _make_part(
    group: Group,
    tier: Tier,
    start: int,
    stop: int,
    tensors: Sequence[torch.Tensor],
    state_format: StateFormat,
    layout: PartLayout,
) -> Part:
    master, exp_avg, exp_avg_sq, *rest = tensors
    accumulator = rest.pop() if layout.accumulator else None
    scales = (rest[0], rest[1]) if layout.scales else None
    return Part(group, tier, start, stop, master, exp_avg, exp_avg_sq, accumulator, state_format, scales)
