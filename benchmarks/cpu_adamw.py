"""How close the native CPU AdamW step comes to the memory bandwidth of this machine.

    python benchmarks/cpu_adamw.py [--params 50000000] [--threads 1,2,4] [--repeats 15] [--out cpu_adamw.json]

For each number of threads the step (bf16 gradient in, bf16 parameter out) and a probe that moves the same bytes with
next to no arithmetic take turns on the same tensors, so that both see the same machine. GB/s counts 28 bytes a
parameter: 3 float32 read and written, 2 bytes read, 2 written (what the hardware reads in order to write is not
counted). `ratio` is the probe's time over the step's, per pair: median and the span of the middle half.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from command_line import Parser, result_file, run, whole_number, write_result

from heavylift.errors import UserError
from heavylift.memory.machine import host_available_bytes
from heavylift.offload import native
from heavylift.offload.adamw import AdamWHyper, adamw_step_
from heavylift.offload.native import NativeKernel, ThreadPool
from heavylift.offload.tensors import StepTensors

BYTES_PER_PARAM = 3 * 4 * 2 + 2 + 2
MEMORY_PER_PARAM = 2 * (3 * 4 + 2 + 2) + 4
"""Step and probe have tensors of their own; the gradient is drawn in float32."""
MAX_THREADS = 1024
"""As `engine.cpu_threads` takes."""
HYPER = AdamWHyper(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10)


def main() -> int:
    """Times every number of threads."""
    args = arguments()
    kernel = native.load()
    if kernel is None:
        raise UserError("the native kernel is not built; install g++ and install heavylift again")
    needed, free = args.params * MEMORY_PER_PARAM, host_available_bytes()
    if needed > free:
        raise UserError(
            f"--params {args.params}: {needed / 2**30:.1f} GiB are needed, {free / 2**30:.1f} GiB are free; lower it"
        )
    cpus = sorted(os.sched_getaffinity(0))
    counts = args.threads or _doubling(len(cpus))
    tensors = _tensors(args.params)
    print(f"{args.params:,} parameters, {kernel.isa}, {len(cpus)} CPUs allowed, median of {args.repeats} pairs")
    print(f"{'threads':>7} {'step GB/s':>10} {'probe GB/s':>10} {'ratio':>6} {'middle half':>13} {'Gparam/s':>9}")
    rows = []
    for count in counts:
        row = _measure(kernel, tensors, count, cpus, args.repeats)
        rows.append(row)
        span = f"{row['ratio_q1']:.3f}-{row['ratio_q3']:.3f}"
        print(
            f"{count:>7} {row['step_gb_per_s']:>10.1f} {row['probe_gb_per_s']:>10.1f} {row['ratio']:>6.3f} {span:>13} "
            f"{row['gparam_per_s']:>9.3f}"
        )
    twin_s = _time(lambda: adamw_step_(tensors, HYPER))
    twin = {"threads": torch.get_num_threads(), "gb_per_s": args.params * BYTES_PER_PARAM / twin_s / 1e9}
    print(f"plain PyTorch twin, {twin['threads']} threads: {twin['gb_per_s']:.1f} GB/s")
    if args.out:
        result = {
            "machine": {"processor": _processor(), "cpus": len(cpus), "isa": kernel.isa, "torch": torch.__version__},
            "params": args.params,
            "repeats": args.repeats,
            "bytes_per_param": BYTES_PER_PARAM,
            "rows": rows,
            "twin": twin,
        }
        write_result(args.out, json.dumps(result, indent=1) + "\n")
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("--params", type=whole_number, default=50_000_000, help="take many times the last cache")
    parser.add_argument("--threads", type=_counts, help="default: 1, 2, 4 .. all")
    parser.add_argument("--repeats", type=whole_number, default=15, help="pairs of step and probe per count")
    parser.add_argument("--out", type=result_file, help="write the numbers to this JSON file")
    return parser.parse_args()


def _counts(text: str) -> list[int]:
    counts = [whole_number(count) for count in text.split(",")]
    for count in counts:
        if count > MAX_THREADS:
            raise argparse.ArgumentTypeError(f"expected at most {MAX_THREADS} threads, got {count}")
    return counts


def _doubling(limit: int) -> list[int]:
    counts = [1]
    while counts[-1] * 2 < limit:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == limit else [*counts, limit]


def _tensors(n: int) -> StepTensors:
    """master, exp_avg, exp_avg_sq float32 [n], grad and param_out bfloat16 [n]."""
    torch.manual_seed(0)
    master, grad = torch.randn(n), torch.randn(n).bfloat16()
    return StepTensors(master, torch.zeros(n), torch.zeros(n), grad, torch.zeros(n, dtype=torch.bfloat16))


def _measure(
    kernel: NativeKernel, tensors: StepTensors, num_threads: int, cpus: list[int], repeats: int
) -> dict[str, float]:
    n = tensors.master.numel()
    # the probe adds the gradient over and over: on copies, or the step would soon compute with large numbers
    a, b, c, source, out = (t.clone() for t in tensors.named().values())
    with _pool(kernel, num_threads, cpus) as pool:
        step_s, probe_s = [], []
        for repeat in range(repeats + 1):
            step = _time(lambda: kernel.adamw_step_(pool, tensors, HYPER))
            probe = _time(lambda: kernel.bandwidth_probe(pool, a, b, c, source, out))
            if repeat > 0:  # the first pair meets cold pages
                step_s.append(step)
                probe_s.append(probe)
    ratios = [probe / step for probe, step in zip(probe_s, step_s, strict=True)]
    q1, median, q3 = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "threads": num_threads,
        "step_gb_per_s": n * BYTES_PER_PARAM / statistics.median(step_s) / 1e9,
        "probe_gb_per_s": n * BYTES_PER_PARAM / statistics.median(probe_s) / 1e9,
        "gparam_per_s": n / statistics.median(step_s) / 1e9,
        "ratio": median,
        "ratio_q1": q1,
        "ratio_q3": q3,
    }


def _pool(kernel: NativeKernel, num_threads: int, cpus: list[int]) -> ThreadPool:
    """Threads spread over `cpus`. Raises UserError where they cannot be started."""
    try:
        return kernel.pool(num_threads, [cpus[t % len(cpus)] for t in range(num_threads)])
    except OSError as error:
        raise UserError(f"--threads {num_threads}: {error}; give fewer") from None


def _time(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    run(main)
