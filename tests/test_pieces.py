"""Steps whose gradients, parameters or both lie on the device, through a ring: the same bits as in one go.

The CUDA driver is a played one, whose copies are late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from adamw_helpers import needs_kernel, the_kernel
from played_driver import DOWN, UP, PlayedDriver

from heavylift.config.schema import StateFormat, Tier
from heavylift.offload.adamw import AdamWHyper
from heavylift.offload.noise import noise_of
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions
from heavylift.offload.quantised import GRIDS, block_scales, encode
from heavylift.offload.staging import RingSize, StagingRing
from heavylift.offload.tensors import StepTensors, Traffic
from heavylift.offload.tiers import TierUsage

HYPER = AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=2)
NUMEL, PIECE = 500_500, 65_536 + 256
"""Eight pieces of three chunks, the last one short."""
NUM_SLOTS = 3
PLACES = (slice(0, 40_000), slice(40_100, 40_101), slice(40_101, 500_101))
"""Shards that leave gaps and end inside of pieces."""

pytestmark = needs_kernel


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heavylift.offload.staging.PIECE_NUMEL", PIECE)
    monkeypatch.setattr("heavylift.offload.staging.NUM_SLOTS", NUM_SLOTS)


def make_ring(played: PlayedDriver, dtype: torch.dtype, *, fetches_grads: bool) -> StagingRing:
    """One whose events are the played driver's."""
    size = RingSize(NUMEL, dtype, steps=True, fetches_grads=fetches_grads, accumulates=False)
    ring = StagingRing(size, torch.device("cpu"), TierUsage())
    play_events(ring, played)
    return ring


def play_events(ring: StagingRing, played: PlayedDriver) -> None:
    for slot in ring.slots:
        slot.fetched, slot.sent = played.event(), played.event()  # type: ignore[assignment]


def draw(state_format: StateFormat, out_dtype: torch.dtype) -> Callable[[], StepTensors]:
    """Makes the same tensors every time."""
    generator = torch.Generator().manual_seed(3)
    master, exp_avg, exp_avg_sq = (torch.rand(NUMEL, generator=generator) for _ in range(3))
    grad = torch.randn(NUMEL, generator=generator).bfloat16()
    out = torch.rand(NUMEL, generator=generator).to(out_dtype)

    def make() -> StepTensors:
        plain = StepTensors(master.clone(), exp_avg.clone(), exp_avg_sq.clone(), grad, out.clone(), state_format)
        if state_format is StateFormat.SPLIT:
            return replace(plain, master=(master * 2**15).to(torch.int16))
        if state_format is StateFormat.BF16:
            return replace(
                plain, exp_avg=exp_avg.bfloat16(), exp_avg_sq=exp_avg_sq.bfloat16(), noise=noise_of("w", 2, 0)
            )
        if state_format is StateFormat.INT8:
            scales = block_scales(exp_avg), block_scales(exp_avg_sq)
            codes = (
                encode(exp_avg, scales[0], GRIDS["exp_avg"], None),
                encode(exp_avg_sq, scales[1], GRIDS["exp_avg_sq"], None),
            )
            return replace(plain, exp_avg=codes[0], exp_avg_sq=codes[1], scales=scales, noise=noise_of("w", 2, 0))
        return plain

    return make


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    ("operation", "state_format", "out_dtype", "fetches_grads"),
    [
        *(("step", state_format, torch.bfloat16, fetches) for state_format in StateFormat for fetches in (False, True)),
        ("step", StateFormat.FP32, torch.float32, False),
        ("step", StateFormat.FP32, torch.float16, True),
        ("correct", StateFormat.FP32, torch.bfloat16, True),
        ("correct", StateFormat.SPLIT, torch.bfloat16, False),
        ("undo", StateFormat.SPLIT, torch.bfloat16, True),
    ],
)
def test_piece_by_piece_is_the_same(
    operation: str, state_format: StateFormat, out_dtype: torch.dtype, fetches_grads: bool, num_threads: int
) -> None:
    kernel, make = the_kernel(), draw(state_format, out_dtype)
    whole, pieces = make(), make()
    assert whole.param_out is not None and pieces.param_out is not None
    if fetches_grads and out_dtype is not torch.bfloat16:  # gradients have the dtype of the parameters
        whole, pieces = (replace(t, grad=t.grad.to(out_dtype)) for t in (whole, pieces))
    shards = [pieces.param_out[place].clone() for place in PLACES]
    split = state_format is StateFormat.SPLIT
    played = PlayedDriver()
    ring = make_ring(played, out_dtype, fetches_grads=fetches_grads)
    traffic = Traffic(tuple(zip(PLACES, shards, strict=True)), fetches_grads, split, ring, played.driver, DOWN, UP)

    def run(tensors: StepTensors, kind: str) -> None:
        if kind == "step":
            kernel.adamw_step_(pool, tensors, HYPER)
        elif kind == "correct":
            kernel.adamw_correct_(pool, tensors, HYPER, 0.5)
        else:
            kernel.adamw_undo_(pool, tensors, HYPER)

    with kernel.pool(num_threads) as pool:
        for kind in ("step",) if operation == "step" else ("step", operation):
            # twice in a row without waiting: the second fetches what the first may still be sending
            run(whole, kind)
            run(replace(pieces, param_out=None, traffic=traffic), kind)
    played.synchronize()
    for place, shard in zip(PLACES, shards, strict=True):
        assert torch.equal(shard, whole.param_out[place])
    inside = torch.zeros(NUMEL, dtype=torch.bool)
    for place in PLACES:
        inside[place] = True
    # elements outside of the shards have no parameter: with split masters their states mean nothing
    for name, tensor in whole.named().items():
        if name != "param_out":
            other = pieces.named()[name]
            assert torch.equal(tensor[inside], other[inside]) if split else torch.equal(tensor, other), name
    for ours, theirs in zip(whole.scales or (), pieces.scales or (), strict=True):
        assert torch.equal(ours, theirs)
    num_runs = 1 if operation == "step" else 2
    ups = [size for kind, _, _, size in played.copies if kind == "up"]
    assert sum(ups) == num_runs * sum(shard.nbytes for shard in shards) and max(ups) <= PIECE * shards[0].itemsize
    assert len([1 for kind, *_ in played.copies if kind == "down"]) == num_runs * (8 * fetches_grads + 10 * split)
    assert not fetches_grads and not split or traffic.starved_s > 0


@pytest.mark.parametrize("numel", [1000, PIECE + 1])
def test_a_range_of_less_than_the_ring(numel: int) -> None:
    """The correction takes other places than the step whose parameters are still on their way up."""
    kernel, make = the_kernel(), draw(StateFormat.SPLIT, torch.bfloat16)
    few = slice(0, numel)
    whole, pieces = make().part(few), make().part(few)
    assert whole.param_out is not None and pieces.param_out is not None
    shard, played = pieces.param_out.clone(), PlayedDriver()
    ring = make_ring(played, torch.bfloat16, fetches_grads=True)
    traffic = Traffic(((few, shard),), True, True, ring, played.driver, DOWN, UP)
    travelling = replace(pieces, param_out=None, traffic=traffic)
    with kernel.pool(2) as pool:
        for tensors in (whole, travelling):
            kernel.adamw_step_(pool, tensors, HYPER)
            if tensors is travelling:
                ring.slots.reverse()
            kernel.adamw_correct_(pool, tensors, HYPER, 0.5)
    played.synchronize()
    assert torch.equal(shard, whole.param_out) and torch.equal(pieces.exp_avg, whole.exp_avg)


@pytest.mark.parametrize("fails_at", [0, 5, 20])
def test_a_copy_that_fails_is_told(fails_at: int) -> None:
    tensors, played = draw(StateFormat.SPLIT, torch.bfloat16)(), PlayedDriver(fails_at=fails_at)
    assert tensors.param_out is not None
    ring = make_ring(played, torch.bfloat16, fetches_grads=True)
    shards = ((slice(0, NUMEL), tensors.param_out.clone()),)
    traffic = Traffic(shards, True, True, ring, played.driver, DOWN, UP)
    failing = replace(tensors, param_out=None, traffic=traffic)
    with the_kernel().pool(3) as pool, pytest.raises(RuntimeError, match="from or to the device: .* error 201"):
        the_kernel().adamw_step_(pool, failing, HYPER)
    played.synchronize()


def test_a_pool_that_is_closed_does_not_wait_for_a_device_that_never_answers() -> None:
    tensors, played = draw(StateFormat.SPLIT, torch.bfloat16)(), PlayedDriver(stands_still=True)
    assert tensors.param_out is not None
    ring = make_ring(played, torch.bfloat16, fetches_grads=True)
    shards = ((slice(0, NUMEL), tensors.param_out.clone()),)
    traffic = Traffic(shards, True, True, ring, played.driver, DOWN, UP)
    pool, said = the_kernel().pool(2), []

    def step() -> None:
        try:
            the_kernel().adamw_step_(pool, replace(tensors, param_out=None, traffic=traffic), HYPER)
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=step)
    thread.start()
    while not played.copies:  # it has begun
        time.sleep(0.01)
    pool.close()
    thread.join()
    assert len(said) == 1 and said[0].endswith("error 600")


class PlayedStream:
    """What a step asks of a stream."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle

    def query(self) -> bool:
        return True

    def record_event(self) -> None:
        return None


@pytest.mark.parametrize("state_format", list(StateFormat))
def test_every_parameter_of_a_part_arrives(state_format: StateFormat) -> None:
    """The way from the optimizer to the copies: a part that begins inside a parameter, two parameter groups, a
    parameter without gradient between others; beside the plain twin of the compiled kernel's copies."""

    def run(by_kernel: bool) -> tuple[list[torch.Tensor], int]:
        generator = torch.Generator().manual_seed(1)
        sizes = (5000, 1, 170_001, 300, 4097)
        params = [torch.nn.Parameter(torch.randn(n, generator=generator).bfloat16()) for n in sizes]
        param_groups = [{"params": params[::2], "lr": 1e-2}, {"params": params[1::2], "lr": 1e-3}]
        options = TieredOptions(tier=Tier.HOST, ratio=0.9, state_format=state_format, num_threads=2)
        optimizer = TieredAdamW(param_groups, options=options)
        for index, param in enumerate(params):
            param.grad = None if index == 3 else torch.randn(param.numel(), generator=generator).bfloat16()
        [group] = optimizer.groups
        part = next(part for parts in optimizer.parts for part in parts if part.tier is Tier.HOST)
        steps = [optimizer._begin_segment(s) for s in group.segments if s.param.grad is not None]
        played, stepper = PlayedDriver(), optimizer._stepper
        assert stepper.ring is not None
        plain = list(stepper.ring.slots)
        if by_kernel:
            play_events(stepper.ring, played)
            stepper.streams.fetch, stepper.streams.h2d = PlayedStream(DOWN), PlayedStream(UP)  # type: ignore[assignment]
        group.gate.close()
        with (
            patch("heavylift.offload.pieces.cuda_driver", lambda: played.driver),
            patch("heavylift.offload.pieces.on_stream", lambda _: nullcontext()),
        ):
            stepper.step_host_part(part, steps, group.grads()[part.start : part.stop].clone())
        played.synchronize()
        stepper.streams.fetch = stepper.streams.h2d = None
        for slot in plain:
            slot.fetched = slot.sent = None
        group.gate.wait()
        optimizer.close()
        return [param.detach().clone() for param in params], len(played.copies)

    (sent, num_copies), (copied, none) = run(True), run(False)
    assert none == 0 and num_copies >= 4
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(sent, copied, strict=True))
