"""heavylift and DeepSpeed on the same machine, shape, micro-batch and sequence length, one after the other.

    python benchmarks/compare_deepspeed.py --nproc 4 --size 8b --out comparison.json [--cases NAME,NAME] [--add]

Each case is a process of its own with a time limit; one that fails is written down as failed, and the others go on. The
JSON file is written anew after every case. `--add` keeps the cases that the file has already, so that a comparison
can be made in several calls. What DeepSpeed needs, and what is not alike in the two: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import Parser, result_file, run, seconds, whole_number, write_result

from heavylift.errors import UserError

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Size:
    """A shape to train."""

    shape: str
    micro_batch: int
    seq: int


SIZES = {
    "8b": Size("examples/shapes/llama_3_1_8b", 4, 4096),
    "70b": Size("examples/shapes/llama_3_3_70b", 4, 4096),
    "tiny": Size("examples/shapes/tiny_llama", 2, 64),  # to try this script
}
ON_HOST = ("engine.offload_optimizer=host", "engine.ratio=0.9")
HEAVYLIFT = {
    "heavylift-device": ("engine.offload_optimizer=device", "train.max_grad_norm=1.0"),
    # the norm never comes near 10^4: clipping is on and does not strike
    "heavylift-host90-calm": (*ON_HOST, "train.max_grad_norm=10000.0"),
    "heavylift-host90-clipped": (*ON_HOST, "train.max_grad_norm=1.0"),
}
DEEPSPEED = {
    "deepspeed-device": ("none", "1.0"),
    "deepspeed-zero-offload-clip1": ("zero", "1.0"),
    "deepspeed-zero-offload-clip0": ("zero", "0.0"),
    "deepspeed-superoffload-clip1": ("super", "1.0"),
    "deepspeed-superoffload-clip0": ("super", "0.0"),
}
CASES = (*HEAVYLIFT, *DEEPSPEED)
DEFAULT_CASES = tuple(case for case in CASES if case != "deepspeed-device")


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = Parser(__doc__)
    parser.add_argument("--nproc", type=whole_number, required=True, help="processes, one per GPU")
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--micro-batch", type=whole_number, help="samples per process and step; default: by size")
    parser.add_argument("--seq", type=whole_number, help="tokens of a sample; default: by size")
    # `auto` speculates from the fifth step on: warm-up must be longer
    parser.add_argument("--steps", type=whole_number, default=12)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--timeout", type=seconds, default=300, metavar="S", help="of one case (default 300)")
    parser.add_argument("--cases", default=",".join(DEFAULT_CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--out", type=result_file, required=True, help="JSON file")
    parser.add_argument("--add", action="store_true", help="keep the cases that are in the file, run only the others")
    parser.add_argument("--overwrite", action="store_true", help="replace the file")
    args = parser.parse_args()
    args.cases = [case for case in args.cases.split(",") if case]
    args.micro_batch = args.micro_batch or SIZES[args.size].micro_batch
    args.seq = args.seq or SIZES[args.size].seq
    unknown = [case for case in args.cases if case not in CASES]
    if unknown:
        parser.error(f"--cases: no case {', '.join(unknown)}; choose of {', '.join(CASES)}")
    if not 0 <= args.warmup < args.steps:
        parser.error(f"argument --warmup: expected a number from 0 below --steps {args.steps}, got {args.warmup}")
    if args.out.exists() and not (args.add or args.overwrite):
        parser.error(f"{args.out}: exists; choose another --out, or give --add or --overwrite")
    return args


def heavylift_command(case: str, args: argparse.Namespace, folder: Path) -> list[str]:
    """`heavylift bench` of one case; its result is folder/CASE.json."""
    values = {
        "model.model_name_or_path": SIZES[args.size].shape,
        "data.cutoff_len": args.seq,
        "data.num_samples": args.micro_batch * args.nproc * args.steps,
        "train.per_device_train_batch_size": args.micro_batch,
        "train.max_steps": args.steps,
        "train.gradient_checkpointing": "true",
    }
    command = [sys.executable, "-m", "heavylift", "bench", "examples/llama_3_1_8b_random.yaml"]
    command += [f"{key}={value}" for key, value in values.items()]
    command += [*HEAVYLIFT[case], "--nproc", str(args.nproc), "--warmup", str(args.warmup)]
    return [*command, "--name", case, "--out", str(folder)]


def deepspeed_command(case: str, args: argparse.Namespace, folder: Path) -> list[str]:
    """DeepSpeed's launcher with `deepspeed_llama.py`, cores bound to ranks (half as fast without)."""
    mode, clip = DEEPSPEED[case]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(args.nproc)]
    command += ["--bind_cores_to_rank", "--no_local_rank", "benchmarks/deepspeed_llama.py", mode]
    command += [SIZES[args.size].shape, "--micro-batch", str(args.micro_batch), "--seq", str(args.seq)]
    command += ["--clip", clip, "--steps", str(args.steps), "--warmup", str(args.warmup)]
    return [*command, "--out", str(folder / f"{case}.json")]


def run_case(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """The case's result, or {"failed": why, "output": last lines}."""
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        folder = Path(name)
        build = heavylift_command if case in HEAVYLIFT else deepspeed_command
        command = build(case, args, folder)
        log = folder / "log.txt"
        start_s = time.perf_counter()
        with log.open("w", encoding="utf-8") as file:
            failed = run_limited(command, file, args.timeout)
        wall_s = time.perf_counter() - start_s
        result_path = folder / f"{case}.json"
        if result_path.exists():  # DeepSpeed may hang or fail at its end, with the result written
            return {"wall_s": wall_s, **json.loads(result_path.read_text(encoding="utf-8"))}
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
        return {"failed": failed or "no result was written", "wall_s": wall_s, "output": tail}


def run_limited(command: list[str], output: Any, timeout_s: float) -> str | None:
    """Runs the command in a process group of its own; all of it is ended after the time. Says why it failed, if."""
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    # DeepSpeed compiles its CPU Adam with nvcc at first use and stumbles over the 9.0a that torch would choose
    env = {"TORCH_CUDA_ARCH_LIST": "9.0", **os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        code = process.wait(timeout_s)
        return None if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        return f"not done after {timeout_s:g} s"
    finally:
        try:
            # also what the command left behind
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def table(cases: dict[str, dict[str, Any]]) -> str:
    """One line per case; `x device`: tokens/s relative to heavylift with everything on the device."""
    base = cases.get("heavylift-device", {}).get("tokens_per_s")
    head = f"{'case':<30} {'s/step':>8} {'min-max':>15} {'TFLOPS':>8} {'tokens/s':>9} {'device':>7} {'x device':>8}"
    lines = [head + f" {'hidden':>7}"]
    for case, result in cases.items():
        if "failed" in result:
            lines.append(f"{case:<30} failed: {result['failed']}")
            continue
        step_s, offload = result["step_s"], result.get("offload")
        span = f"{step_s['min']:.3f}-{step_s['max']:.3f}"
        relative = f"{result['tokens_per_s'] / base:.3f}" if base else "-"
        hidden = f"{offload['hidden']:.1%}" if offload and offload["hidden"] is not None else "-"
        lines.append(
            f"{case:<30} {step_s['median']:>8.3f} {span:>15} {result['tflops']:>8.4g} "
            f"{result['tokens_per_s']:>9,.0f} {result['peak_device_gib']:>7.1f} {relative:>8} {hidden:>7}"
        )
    return "\n".join(lines)


def ratios(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How many times as many tokens/s each heavylift case has as each other case."""
    speed = {case: result["tokens_per_s"] for case, result in cases.items() if "failed" not in result}
    return {
        ours: {other: speed[ours] / speed[other] for other in speed if other != ours}
        for ours in speed
        if ours in HEAVYLIFT
    }


def cases_before(path: Path, asked: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The cases of an older file that did not fail. Raises UserError for a file that is no comparison, or of another
    setup than is `asked` for."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        setup, cases = before["setup"], dict(before["cases"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{path}: is no result of a comparison, so --add has nothing to add to; choose another --out"
        ) from None
    if setup != asked:
        raise UserError(f"{path}: is of {setup}, not of {asked}; choose another --out")
    return {case: result for case, result in cases.items() if "failed" not in result}


def main() -> int:
    """All cases. 0 if none failed."""
    args = arguments()
    asked = {"nproc": args.nproc, "size": args.size, "micro_batch": args.micro_batch, "seq": args.seq}
    cases: dict[str, dict[str, Any]] = {}
    if args.add and args.out.exists():
        cases = cases_before(args.out, asked)
    for case in [case for case in args.cases if case not in cases]:
        print(f"{case} ...", flush=True)
        cases[case] = run_case(case, args)
        result = cases[case]
        said = f"failed: {result['failed']}" if "failed" in result else f"{result['step_s']['median']:.3f} s/step"
        print(f"  {said}", flush=True)
        whole = {"setup": asked, "ratios": ratios(cases), "cases": cases}
        write_result(args.out, json.dumps(whole, indent=1) + "\n")
    print("\n" + table(cases))
    return int(any("failed" in result for result in cases.values()))


if __name__ == "__main__":
    run(main)
