"""New parameters that the compiled kernel sends on, piece by piece: the same bits, each element once, nothing else.

The function that copies is the CUDA driver's in a run; here it is one that looks at what it is asked for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from adamw_helpers import needs_kernel, the_kernel

from heavylift.config.schema import StateFormat, Tier
from heavylift.offload.adamw import AdamWHyper
from heavylift.offload.noise import noise_of
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions
from heavylift.offload.quantised import GRIDS, block_scales, encode
from heavylift.offload.tensors import Send, StepTensors

HYPER = AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=2)
NUMEL, PIECE = 110_500, 32_768 + 256
PLACES = (slice(0, 40_000), slice(40_100, 40_101), slice(40_101, 110_101))
"""Shards that leave gaps and end inside of pieces."""
STREAM = 77
_TYPE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

pytestmark = needs_kernel


def address_of(function: ctypes._CFuncPtr) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


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


@pytest.mark.parametrize(
    ("operation", "state_format", "out_dtype"),
    [
        *(("step", state_format, torch.bfloat16) for state_format in StateFormat),
        ("step", StateFormat.FP32, torch.float32),
        ("step", StateFormat.FP32, torch.float16),
        ("correct", StateFormat.FP32, torch.bfloat16),
        ("undo", StateFormat.SPLIT, torch.bfloat16),
    ],
)
def test_new_parameters_are_sent_piece_by_piece(
    operation: str, state_format: StateFormat, out_dtype: torch.dtype
) -> None:
    kernel, make = the_kernel(), draw(state_format, out_dtype)
    whole, pieces = make(), make()
    out = pieces.param_out
    assert whole.param_out is not None and out is not None
    shards = [torch.full((place.stop - place.start,), -1.0, dtype=out_dtype) for place in PLACES]
    sent: list[tuple[int, int]] = []

    def copy(target: int, source: int, num_bytes: int, stream: int) -> int:
        sent.append(((source - out.data_ptr()) // out.itemsize, num_bytes // out.itemsize))
        ctypes.memmove(target, source, num_bytes)
        return 0 if stream == STREAM else 1

    function = _TYPE(copy)
    send = Send(tuple(zip(PLACES, shards, strict=True)), STREAM, address_of(function), PIECE)
    with kernel.pool(2) as pool:
        for tensors in (whole, replace(pieces, send=send)):
            if operation != "step":  # there must be one that can be taken back
                kernel.adamw_step_(pool, replace(tensors, send=None), HYPER)
            if operation == "step":
                kernel.adamw_step_(pool, tensors, HYPER)
            elif operation == "correct":
                kernel.adamw_correct_(pool, tensors, HYPER, 0.5)
            else:
                kernel.adamw_undo_(pool, tensors, HYPER)
    for name, tensor in whole.named().items():
        assert torch.equal(tensor, pieces.named()[name]), name
    for ours, theirs in zip(whole.scales or (), pieces.scales or (), strict=True):
        assert torch.equal(ours, theirs)
    for place, shard in zip(PLACES, shards, strict=True):
        assert torch.equal(shard, whole.param_out[place])
    # in order, none across the end of a piece: they leave while the next piece is computed
    ends = [start + size for start, size in sent]
    assert sum(size for _, size in sent) == sum(shard.numel() for shard in shards) and sorted(ends) == ends
    assert len(sent) == 6
    assert all(start // PIECE == (end - 1) // PIECE for (start, _), end in zip(sent, ends, strict=True))


def test_a_copy_that_fails_is_told() -> None:
    function = _TYPE(lambda *_: 201)
    tensors, shard = draw(StateFormat.FP32, torch.bfloat16)(), torch.zeros(NUMEL, dtype=torch.bfloat16)
    failing = replace(tensors, send=Send(((slice(0, NUMEL), shard),), STREAM, address_of(function), PIECE))
    with the_kernel().pool(1) as pool, pytest.raises(RuntimeError, match="could not be copied to the device: .* 201"):
        the_kernel().adamw_step_(pool, failing, HYPER)


class HostStream:
    """What a step asks of the stream that copies up; its copies are done when they are asked for."""

    cuda_stream = STREAM

    def query(self) -> bool:
        return True

    def record_event(self) -> None:
        return None


@pytest.mark.parametrize("state_format", list(StateFormat))
def test_every_parameter_of_a_part_arrives(state_format: StateFormat) -> None:
    """The way from the optimizer to the copies: a part that begins inside a parameter, two parameter groups, a
    parameter without gradient between others; beside parts whose parameters are copied as tensors."""

    def run(sends: bool) -> tuple[list[torch.Tensor], int]:
        generator = torch.Generator().manual_seed(1)
        sizes = (5000, 1, 70_001, 300, 4097)
        params = [torch.nn.Parameter(torch.randn(n, generator=generator).bfloat16()) for n in sizes]
        param_groups = [{"params": params[::2], "lr": 1e-2}, {"params": params[1::2], "lr": 1e-3}]
        options = TieredOptions(tier=Tier.HOST, ratio=0.9, state_format=state_format, num_threads=2)
        optimizer = TieredAdamW(param_groups, options=options)
        num_copies = 0

        def copy(target: int, source: int, num_bytes: int, stream: int) -> int:
            nonlocal num_copies
            num_copies += 1
            ctypes.memmove(target, source, num_bytes)
            return 0 if stream == STREAM else 1

        function = _TYPE(copy)
        for index, param in enumerate(params):
            param.grad = None if index == 3 else torch.randn(param.numel(), generator=generator).bfloat16()
        [group] = optimizer.groups
        part = next(part for parts in optimizer.parts for part in parts if part.tier is Tier.HOST)
        steps = [optimizer._begin_segment(s) for s in group.segments if s.param.grad is not None]
        if sends:
            optimizer._stepper.streams.h2d = HostStream()  # type: ignore[assignment]
        group.gate.close()
        with (
            patch("heavylift.offload.stepping.copy_to_device", lambda: address_of(function)),
            patch("heavylift.offload.stepping.on_stream", lambda _: nullcontext()),
            patch("heavylift.offload.stepping.PIECE_NUMEL", 32_768),
        ):
            optimizer._stepper.step_host_part(part, steps, group.grads()[part.start : part.stop].clone())
        optimizer._stepper.streams.h2d = None
        group.gate.wait()
        optimizer.close()
        return [param.detach().clone() for param in params], num_copies

    (sent, num_copies), (copied, none) = run(True), run(False)
    assert none == 0 and num_copies >= 4
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(sent, copied, strict=True))
