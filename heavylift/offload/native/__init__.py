"""The compiled CPU kernel, called through ctypes (which releases the GIL while it runs).

`load()` finds `_adamw.so` beside this file, or where an editable install put it, and returns None when there is none:
then `heavylift.offload.adamw.adamw_step_` does the same work with the same bits. Tensors are checked by asserts here,
because behind this line there are only pointers. Left out: choosing threads and CPUs, which is the caller's business.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Sequence
from ctypes import (
    CDLL,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import astuple, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from heavylift.config.schema import StateFormat
from heavylift.offload.adamw import AdamWHyper, AdamWScalars
from heavylift.offload.correction import check_exact, check_undo, clipped_scale, correction_scalars
from heavylift.offload.cuda_driver import Driver
from heavylift.offload.quantised import BLOCK
from heavylift.offload.staging import MAX_AHEAD
from heavylift.offload.tensors import MOMENTS, StepTensors, Traffic
from heavylift.offload.timeline import ThreadSpan

LIBRARY_NAME = "_adamw.so"
_ABI = 9
"""`hl_abi()` of the library that goes with this file."""
_CPUS_SHOWN = 8

_log = logging.getLogger(__name__)


class _CTensors(Structure):
    """`StepTensors` of native/step.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("master", "master_low", "exp_avg", "exp_avg_sq", "exp_avg_16")),
        *((name, c_void_p) for name in ("exp_avg_sq_16", "exp_avg_8", "exp_avg_sq_8", "exp_avg_scales")),
        *((name, c_void_p) for name in ("exp_avg_sq_scales", "grad", "out")),
        ("n", c_int64),
        ("grad_type", c_int32),
        ("out_type", c_int32),
        ("noise_key", c_uint32),
        ("noise_first", c_uint32),
    ]


class _CFactors(Structure):
    """`StepFactors` of native/step.h: the fields of `AdamWScalars` in their order."""

    _fields_ = [(field.name, c_int32 if field.name == "update" else c_float) for field in fields(AdamWScalars)]


class _CCorrection(Structure):
    """`CorrectionFactors` of native/step.h."""

    _fields_ = [("inverse_beta1", c_float), ("clipped_scale", c_float), ("first_step", c_int32)]


class _CShard(Structure):
    """`Shard` of native/pieces.h."""

    _fields_ = [("start", c_int64), ("stop", c_int64), ("address", c_uint64)]


class _CSlot(Structure):
    """`Slot` of native/pieces.h."""

    _fields_ = [(name, c_void_p) for name in ("param", "grad", "fetched", "sent")]


class _CTraffic(Structure):
    """`Traffic` of native/pieces.h."""

    _fields_ = [
        ("driver", Driver),
        ("down", c_void_p),
        ("up", c_void_p),
        ("shards", POINTER(_CShard)),
        ("num_shards", c_int64),
        ("grads", c_uint64),
        ("fetches_params", c_int64),
        ("slots", POINTER(_CSlot)),
        ("num_slots", c_int64),
        ("ahead", c_int64),
        ("piece", c_int64),
        ("starved_s", c_double),
    ]


class _CSpan(Structure):
    """`Span` of native/thread_pool.h."""

    _fields_ = [("start_s", c_double), ("stop_s", c_double)]


_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`Type` of native/floats.h."""

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "hl_abi": (c_int, []),
    "hl_isa": (c_char_p, []),
    "hl_set_isa": (c_int, [c_char_p]),
    "hl_isa_name": (c_char_p, [c_int]),
    "hl_pool_create": (c_void_p, [c_int, POINTER(c_int)]),
    "hl_pool_destroy": (None, [c_void_p]),
    "hl_pool_num_threads": (c_int, [c_void_p]),
    "hl_pool_thread_id": (c_int64, [c_void_p, c_int]),
    "hl_pool_spans": (c_uint64, [c_void_p, c_int, c_uint64, POINTER(_CSpan)]),
    "hl_max_spans": (c_uint64, []),
    "hl_take_step": (c_int, [c_void_p, POINTER(_CTensors), POINTER(_CFactors), POINTER(_CTraffic)]),
    "hl_correct_step": (c_int, [c_void_p, *map(POINTER, (_CTensors, _CFactors, _CCorrection, _CTraffic))]),
    "hl_undo_step": (c_int, [c_void_p, *map(POINTER, (_CTensors, _CFactors, _CCorrection, _CTraffic))]),
    "hl_max_slots": (c_int64, []),
    "hl_accumulate": (None, [c_void_p, c_void_p, c_void_p, c_int, c_int64]),
    "hl_sum_squares": (c_double, [c_void_p, c_void_p, c_int, c_int64]),
    "hl_bandwidth_probe": (None, [c_void_p] * 6 + [c_int64]),
}


class ThreadPool:
    """Threads of the native kernel, each pinned to one CPU. Get one from `NativeKernel.pool`.

    They sleep between calls and do not depend on OMP_NUM_THREADS. Calls from several Python threads run one after
    the other. In a forked child, which has no such threads, calls compute on the calling thread.
    """

    def __init__(self, library: CDLL, num_threads: int, cpu_ids: Sequence[int] | None) -> None:
        assert num_threads >= 1, f"a pool needs at least one thread, got {num_threads}"
        assert cpu_ids is None or len(cpu_ids) == num_threads, f"{num_threads} threads, but {_named(cpu_ids)}"
        cpus = None if cpu_ids is None else (c_int * num_threads)(*cpu_ids)
        handle = library.hl_pool_create(num_threads, cpus)
        if not handle:
            raise OSError(f"could not start {num_threads} threads on {_named(cpu_ids)} (too many, or not allowed here)")
        self._library = library
        self._handle: int = handle
        self.num_threads: int = library.hl_pool_num_threads(handle)
        self._spans_seen = [0] * self.num_threads
        self._spans = (_CSpan * library.hl_max_spans())()
        # also runs at interpreter exit; the C side waits for a call that another thread has in progress
        self._finalizer = weakref.finalize(self, library.hl_pool_destroy, handle)

    @property
    def handle(self) -> int:
        """The C handle. Raises AssertionError after `close`."""
        assert self._finalizer.alive, "this thread pool is closed"
        return self._handle

    def take_spans(self) -> list[ThreadSpan]:
        """When each thread worked since the last call of this, thread by thread; the last 4096 calls' work at most."""
        taken = []
        for thread in range(self.num_threads):
            seen = self._spans_seen[thread]
            count = self._library.hl_pool_spans(self.handle, thread, seen, self._spans)
            self._spans_seen[thread] = count
            thread_id = self._library.hl_pool_thread_id(self.handle, thread)
            fresh = self._spans[: min(count - seen, len(self._spans))]
            taken += [ThreadSpan(thread_id, span.start_s, span.stop_s) for span in fresh]
        return taken

    def close(self) -> None:
        """Wait for the call in progress and end the threads. A second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class NativeKernel:
    """The functions of one loaded library. Results depend neither on the pool's size nor on the instruction set."""

    def __init__(self, path: Path) -> None:
        """Load the library at `path`. Raises OSError if it does not load or is of another version, AttributeError if a
        function is missing."""
        self.path = path
        self._library = CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        if (abi := self._library.hl_abi()) != _ABI:
            raise OSError(f"built from other sources: interface {abi}, expected {_ABI}; install heavylift again")

    @property
    def isa(self) -> str:
        """Instruction set in use: avx512, avx2 or sse2 on x86-64; sve or neon on aarch64; else generic."""
        return self._library.hl_isa().decode()

    def set_isa(self, name: str) -> None:
        """Use another instruction set, in the whole process. Raises ValueError when this CPU or build lacks it."""
        if self._library.hl_set_isa(name.encode()) != 0:
            raise ValueError(f"instruction set: expected one of {self.available_isas()}, got {name!r}")

    def available_isas(self) -> list[str]:
        """What `set_isa` takes on this machine, the default first."""
        before = self.isa
        available: list[str] = []
        for index in itertools.count():
            name = self._library.hl_isa_name(index)
            if name is None:
                break
            if self._library.hl_set_isa(name) == 0:
                available.append(name.decode())
        self._library.hl_set_isa(before.encode())
        return available

    def pool(self, num_threads: int, cpu_ids: Sequence[int] | None = None) -> ThreadPool:
        """Start threads, thread t pinned to `cpu_ids[t]` (None: not pinned). Raises OSError if that is impossible."""
        return ThreadPool(self._library, num_threads, cpu_ids)

    def adamw_step_(self, pool: ThreadPool, tensors: StepTensors, hyper: AdamWHyper) -> None:
        """`heavylift.offload.adamw.adamw_step_` bit for bit, for contiguous CPU tensors, on the threads of `pool`.

        Only the payload of a NaN may differ. With `tensors.traffic` what lies on the device comes down, and the new
        parameters go up, piece by piece. Raises AssertionError for tensors that do not fit or overlap, RuntimeError
        where the driver fails, after which the states are not whole.
        """
        factors = _CFactors(*astuple(hyper.scalars()))
        self._call(self._library.hl_take_step, pool, tensors, factors)

    def adamw_correct_(self, pool: ThreadPool, tensors: StepTensors, hyper: AdamWHyper, coefficient: float) -> None:
        """`heavylift.offload.correction.adamw_correct_` bit for bit; else as `adamw_step_`."""
        check_exact(tensors)
        more = correction_scalars(hyper)
        correction = _CCorrection(more.inverse_beta1, clipped_scale(hyper, coefficient), more.first_step)
        self._call(self._library.hl_correct_step, pool, tensors, _CFactors(*astuple(more.step)), correction)

    def adamw_undo_(self, pool: ThreadPool, tensors: StepTensors, hyper: AdamWHyper) -> None:
        """`heavylift.offload.correction.adamw_undo_` bit for bit; else as `adamw_step_`."""
        check_undo(hyper)
        check_exact(tensors)
        more = correction_scalars(hyper)
        correction = _CCorrection(more.inverse_beta1, 0.0, more.first_step)
        self._call(self._library.hl_undo_step, pool, tensors, _CFactors(*astuple(more.step)), correction)

    def _call(self, function: Any, pool: ThreadPool, tensors: StepTensors, *factors: Structure) -> None:
        traffic = tensors.traffic
        if traffic is None:
            function(pool.handle, _c_tensors(tensors), *factors, None)
            return
        ring = traffic.ring
        assert 0 < len(ring.slots) <= self._library.hl_max_slots(), f"{len(ring.slots)} places"
        c_traffic = _c_traffic(tensors, traffic)
        error = function(pool.handle, _c_travelling(tensors, traffic), *factors, byref(c_traffic))
        if error:
            raise RuntimeError(f"a step could not copy from or to the device: CUDA driver error {error}")
        traffic.starved_s = c_traffic.starved_s

    def accumulate_(self, pool: ThreadPool, acc: Tensor, grad: Tensor) -> None:
        """acc += grad in float32. acc: float32 [n], grad: float32, bfloat16 or float16 [n], contiguous CPU tensors."""
        _check_host(acc, grad)
        _check_disjoint(acc, grad)
        assert acc.dtype == torch.float32, f"acc has dtype {acc.dtype}"
        assert acc.numel() == grad.numel(), f"acc has {acc.numel()} elements, grad {grad.numel()}"
        self._library.hl_accumulate(pool.handle, acc.data_ptr(), grad.data_ptr(), _type_of(grad), acc.numel())

    def sum_squares(self, pool: ThreadPool, x: Tensor) -> float:
        """Sum of x * x in double precision, the same bits whatever the threads; inf or nan if x has any.

        x: float32, bfloat16 or float16, contiguous CPU tensor. A finite float32 squares without overflow in double.
        """
        _check_host(x)
        return self._library.hl_sum_squares(pool.handle, x.data_ptr(), _type_of(x), x.numel())

    def bandwidth_probe(self, pool: ThreadPool, a: Tensor, b: Tensor, c: Tensor, source: Tensor, out: Tensor) -> None:
        """Move the bytes of a step and compute next to nothing: a += source; b += source; c += source; out = source.

        a, b, c: float32 [n]; source, out: bfloat16 [n]. What a step's time is compared with.
        """
        _check_host(a, b, c, source, out)
        _check_disjoint(a, b, c, source, out)
        assert (a.dtype, b.dtype, c.dtype) == (torch.float32,) * 3
        assert source.dtype == out.dtype == torch.bfloat16
        assert {b.numel(), c.numel(), source.numel(), out.numel()} == {a.numel()}, "the probe's tensors differ in size"
        pointers = [tensor.data_ptr() for tensor in (a, b, c, source, out)]
        self._library.hl_bandwidth_probe(pool.handle, *pointers, a.numel())


def _named(cpu_ids: Sequence[int] | None) -> str:
    """The CPUs in a message: each once, the first few of many."""
    if cpu_ids is None:
        return "any CPUs"
    cpus = list(dict.fromkeys(cpu_ids))
    shown = ", ".join(map(str, cpus[:_CPUS_SHOWN]))
    return f"{len(cpus)} CPUs ({shown}{', ...' if len(cpus) > _CPUS_SHOWN else ''})"


def _c_tensors(tensors: StepTensors) -> _CTensors:
    tensors.check()
    scales = tensors.scales or ()
    _check_host(*tensors.named().values(), *scales)
    _check_disjoint(*tensors.named().values(), *scales)
    return _pointers(tensors)


def _pointers(tensors: StepTensors) -> _CTensors:
    scales = tensors.scales or ()
    noise, out = tensors.noise, tensors.param_out
    moments = {torch.float32: "", torch.bfloat16: "_16", torch.uint8: "_8"}[tensors.exp_avg.dtype]
    pointers = {
        "master_low" if tensors.state_format is StateFormat.SPLIT else "master": tensors.master.data_ptr(),
        f"exp_avg{moments}": tensors.exp_avg.data_ptr(),
        f"exp_avg_sq{moments}": tensors.exp_avg_sq.data_ptr(),
        **{f"{name}_scales": scale.data_ptr() for name, scale in zip(MOMENTS, scales, strict=False)},
    }
    return _CTensors(
        **pointers,
        grad=tensors.grad.data_ptr(),
        out=None if out is None else out.data_ptr(),
        n=tensors.master.numel(),
        grad_type=_type_of(tensors.grad),
        out_type=_TYPES[torch.float32] if out is None else _type_of(out),
        noise_key=noise.key if noise else 0,
        noise_first=noise.first % 2**32 if noise else 0,
    )


def _c_travelling(tensors: StepTensors, traffic: Traffic) -> _CTensors:
    """The states, and the gradients where they lie on the host; the rest is in the ring. Checks its first piece as if
    it were all: the others differ in their place only."""
    ring, numel = traffic.ring, tensors.master.numel()
    assert tensors.param_out is None, "new parameters are written to the ring"
    out = ring.slots[0].param_host
    first = tensors.part(slice(0, min(numel, ring.piece_numel)))
    grad = ring.slots[0].grad_host if traffic.fetches_grads else first.grad
    assert grad is not None and grad.dtype == tensors.grad.dtype, (grad, tensors.grad.dtype)
    assert tensors.grad.is_contiguous() and tensors.grad.numel() == numel, (tensors.grad.shape, numel)
    assert ring.piece_numel % BLOCK == 0, ring.piece_numel
    assert (tensors.state_format is StateFormat.SPLIT) <= traffic.fetches_params, "split masters need the parameters"
    first_numel = first.master.numel()
    _c_tensors(replace(first, grad=grad[:first_numel], param_out=out[:first_numel]))
    states = {name: tensor for name, tensor in tensors.named().items() if name != "grad"}
    _check_host(*states.values(), *(tensors.scales or ()))
    _check_disjoint(*states.values(), *(tensors.scales or ()))
    whole = _pointers(tensors)
    whole.grad = None if traffic.fetches_grads else tensors.grad.data_ptr()
    whole.out, whole.out_type = None, _type_of(out)
    return whole


def _c_traffic(tensors: StepTensors, traffic: Traffic) -> _CTraffic:
    """It keeps what it points to."""
    ring, numel = traffic.ring, tensors.master.numel()
    shards = (_CShard * len(traffic.shards))()
    for entry, (where, target) in zip(shards, traffic.shards, strict=True):
        assert target.dtype == ring.slots[0].param_host.dtype and target.is_contiguous(), (
            target.dtype,
            target.stride(),
        )
        assert 0 <= where.start <= where.stop <= numel and where.stop - where.start == target.numel(), where
        entry.start, entry.stop, entry.address = where.start, where.stop, target.data_ptr()
    slots = (_CSlot * len(ring.slots))()
    for place, slot in zip(slots, ring.slots, strict=True):
        assert slot.fetched is not None and slot.sent is not None, "this ring was made for a machine without a GPU"
        place.param, place.fetched, place.sent = (
            slot.param_host.data_ptr(),
            slot.fetched.cuda_event,
            slot.sent.cuda_event,
        )
        place.grad = None if slot.grad_host is None else slot.grad_host.data_ptr()
    return _CTraffic(
        driver=traffic.driver,
        down=traffic.down_handle,
        up=traffic.up_handle,
        shards=shards,
        num_shards=len(shards),
        grads=tensors.grad.data_ptr() if traffic.fetches_grads else 0,
        fetches_params=int(traffic.fetches_params),
        slots=slots,
        num_slots=len(slots),
        ahead=MAX_AHEAD,
        piece=ring.piece_numel,
        starved_s=0.0,
    )


def _type_of(tensor: Tensor) -> int:
    assert tensor.dtype in _TYPES, f"expected float32, bfloat16 or float16, got {tensor.dtype}"
    return _TYPES[tensor.dtype]


def _check_host(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.device.type == "cpu", f"the CPU kernel got a tensor on {tensor.device}"
        assert tensor.is_contiguous(), f"the CPU kernel got strides {tensor.stride()} for shape {tuple(tensor.shape)}"


def _check_disjoint(*tensors: Tensor) -> None:
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.numel())
    for (_, end), (start, _) in zip(spans, spans[1:], strict=False):
        assert end <= start, f"tensors of one step overlap: one ends at {end:#x}, the next starts at {start:#x}"


@functools.cache
def load() -> NativeKernel | None:
    """The kernel, loaded once per process; None, with the reason logged, when it was not built or does not load."""
    # the search path, not __file__: an editable install keeps the compiled file apart from the sources
    folders = [Path(folder) for folder in __path__]
    paths = [folder / LIBRARY_NAME for folder in folders if (folder / LIBRARY_NAME).is_file()]
    if not paths:
        _log.warning(
            "native CPU kernel not found (no %s in %s): using the plain PyTorch step, slower with the same results; "
            "install g++ and install heavylift again to build it",
            LIBRARY_NAME,
            ", ".join(map(str, folders)),
        )
        return None
    try:
        return NativeKernel(paths[0])
    except (OSError, AttributeError) as error:
        _log.warning("native CPU kernel %s does not load (%s): using the plain PyTorch step", paths[0], error)
        return None


__all__ = ["LIBRARY_NAME", "NativeKernel", "ThreadPool", "load"]
