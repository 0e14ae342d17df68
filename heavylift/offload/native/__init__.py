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
    cast,
)
from dataclasses import astuple, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from heavylift.config.schema import StateFormat
from heavylift.offload.adamw import AdamWHyper, AdamWScalars
from heavylift.offload.correction import check_exact, check_undo, clipped_scale, correction_scalars
from heavylift.offload.quantised import BLOCK
from heavylift.offload.tensors import MOMENTS, StepTensors

LIBRARY_NAME = "_adamw.so"
_ABI = 6
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
    """`Shard` of native/step.h."""

    _fields_ = [("start", c_int64), ("stop", c_int64), ("target", c_uint64)]


class _CSend(Structure):
    """`Send` of native/step.h."""

    _fields_ = [
        ("copy", c_void_p),
        ("stream", c_void_p),
        ("shards", POINTER(_CShard)),
        ("num_shards", c_int64),
        ("piece", c_int64),
    ]


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
    "hl_take_step": (c_int, [c_void_p, POINTER(_CTensors), POINTER(_CFactors), POINTER(_CSend)]),
    "hl_correct_step": (c_int, [c_void_p, *map(POINTER, (_CTensors, _CFactors, _CCorrection, _CSend))]),
    "hl_undo_step": (c_int, [c_void_p, *map(POINTER, (_CTensors, _CFactors, _CCorrection, _CSend))]),
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
        self._handle: int = handle
        self.num_threads: int = library.hl_pool_num_threads(handle)
        # also runs at interpreter exit; the C side waits for a call that another thread has in progress
        self._finalizer = weakref.finalize(self, library.hl_pool_destroy, handle)

    @property
    def handle(self) -> int:
        """The C handle. Raises AssertionError after `close`."""
        assert self._finalizer.alive, "this thread pool is closed"
        return self._handle

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

        Only the payload of a NaN may differ. With `tensors.send` each piece of the new parameters is copied on as soon
        as it is computed. Raises AssertionError for tensors that do not fit or overlap, RuntimeError where a copy could
        not be issued.
        """
        factors = _CFactors(*astuple(hyper.scalars()))
        _check_sent(self._library.hl_take_step(pool.handle, _c_tensors(tensors), factors, _c_send(tensors)))

    def adamw_correct_(self, pool: ThreadPool, tensors: StepTensors, hyper: AdamWHyper, coefficient: float) -> None:
        """`heavylift.offload.correction.adamw_correct_` bit for bit; tensors and errors as in `adamw_step_`."""
        check_exact(tensors)
        more = correction_scalars(hyper)
        correction = _CCorrection(more.inverse_beta1, clipped_scale(hyper, coefficient), more.first_step)
        factors, send = _CFactors(*astuple(more.step)), _c_send(tensors)
        _check_sent(self._library.hl_correct_step(pool.handle, _c_tensors(tensors), factors, correction, send))

    def adamw_undo_(self, pool: ThreadPool, tensors: StepTensors, hyper: AdamWHyper) -> None:
        """`heavylift.offload.correction.adamw_undo_` bit for bit; tensors and errors as in `adamw_step_`."""
        check_undo(hyper)
        check_exact(tensors)
        more = correction_scalars(hyper)
        correction = _CCorrection(more.inverse_beta1, 0.0, more.first_step)
        factors, send = _CFactors(*astuple(more.step)), _c_send(tensors)
        _check_sent(self._library.hl_undo_step(pool.handle, _c_tensors(tensors), factors, correction, send))

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


def _c_send(tensors: StepTensors) -> Any:
    """None, or a reference to a `_CSend`, which keeps what it points to."""
    send, out = tensors.send, tensors.param_out
    if send is None:
        return None
    assert out is not None and send.piece_numel > 0 and send.piece_numel % BLOCK == 0, send.piece_numel
    shards = (_CShard * len(send.shards))()
    for entry, (where, target) in zip(shards, send.shards, strict=True):
        assert target.dtype == out.dtype and target.is_contiguous(), (target.dtype, out.dtype, target.stride())
        assert 0 <= where.start <= where.stop <= out.numel() and where.stop - where.start == target.numel(), where
        entry.start, entry.stop, entry.target = where.start, where.stop, target.data_ptr()
    return byref(_CSend(send.copy_function, send.stream_handle, shards, len(shards), send.piece_numel))


def _check_sent(error: int) -> None:
    if error:
        raise RuntimeError(f"new parameters could not be copied to the device: CUDA driver error {error}")


@functools.cache
def copy_to_device() -> int | None:
    """The address of the CUDA driver's cuMemcpyHtoDAsync, for `Send`; None where there is no such driver.

    It copies in the context that is current on the calling thread, from page-locked memory without waiting.
    """
    if torch.version.hip is not None:
        return None  # the streams are not that driver's
    try:
        return cast(CDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2, c_void_p).value
    except (OSError, AttributeError):
        return None


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


__all__ = ["LIBRARY_NAME", "NativeKernel", "ThreadPool", "copy_to_device", "load"]
