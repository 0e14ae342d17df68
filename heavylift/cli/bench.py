"""`heavylift bench`: trains as a recipe says, keeps nothing but the numbers.

The run is an ordinary one (`heavylift.train.worker`) in a temporary run folder, without a model saved or asked; rank 0
writes NAME.json at its end (`heavylift.train.bench`). What can be found wrong is found before anything starts.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import psutil

from heavylift.cli.train import resolved, write_recipe
from heavylift.config.recipe import load_recipe
from heavylift.config.run_folder import nearest_parent
from heavylift.config.schema import Recipe
from heavylift.errors import UserError
from heavylift.launch.cores import default_nproc, requested_nproc
from heavylift.launch.runner import launch_workers, started_elsewhere
from heavylift.train.bench_request import BenchRequest
from heavylift.train.preflight import check, check_processes


def run_bench(
    recipe_path: str, overrides: list[str], num_warmup_steps: int, name: str | None, out: Path, overwrite: bool
) -> int:
    """Runs the recipe and writes `out`/`name`.json. Returns the exit code.

    Raises UserError with everything that is wrong with recipe, model folder, data, name or folder.
    """
    if started_elsewhere():
        raise UserError("heavylift bench: starts its processes itself; run it without torchrun, with --nproc N")
    recipe = load_recipe(recipe_path, overrides)
    name = Path(recipe_path).stem if name is None else name
    path = out / f"{name}.json"
    request = BenchRequest(name, str(path.absolute()), num_warmup_steps, psutil.Process().create_time())
    with tempfile.TemporaryDirectory(prefix="heavylift-bench-") as folder:
        recipe = _measured(recipe, Path(folder) / "run")
        num_samples, nproc = _check(recipe, request, name, path, overwrite)
        check_processes(recipe, num_samples, nproc)
        out.mkdir(parents=True, exist_ok=True)
        request_path = Path(folder) / "request.json"
        args = [write_recipe(resolved(recipe, nproc), Path(folder)), str(request_path)]
        request.write(request_path)
        code = launch_workers(nproc, args)
        trace = recipe.output_dir / "trace.json"
        if code == 0 and trace.exists():
            shutil.copyfile(trace, out / f"{name}.trace.json")
    if code == 0:
        print("\n" + summary(json.loads(path.read_text(encoding="utf-8")), path))
    return code


def _measured(recipe: Recipe, run_folder: Path) -> Recipe:
    """The recipe with its run in `run_folder`, no model saved and no question asked."""
    changes: dict[str, dict[str, Any]] = {
        "train": {"output_dir": str(run_folder), "overwrite_output_dir": False},
        "export": {"save": False},
        "eval": {"sample_prompt": None},
    }
    return recipe.model_copy(
        update={section: getattr(recipe, section).model_copy(update=keys) for section, keys in changes.items()}
    )


def _check(recipe: Recipe, request: BenchRequest, name: str, path: Path, overwrite: bool) -> tuple[int, int]:
    """(number of samples, of processes). Raises UserError with all problems of recipe and request together."""
    problems: list[str] = []
    num_samples, nproc = 0, 1
    try:
        num_samples = check(recipe, requested_nproc(recipe))
        nproc = default_nproc(recipe)
    except UserError as error:
        problems += error.problems
    try:
        if recipe.train.max_steps is not None:
            request.check(recipe.train.max_steps)
    except UserError as error:
        problems += error.problems
    problems += _path_problems(name, path, overwrite)
    if problems:
        raise UserError(*problems)
    return num_samples, nproc


def _path_problems(name: str, path: Path, overwrite: bool) -> list[str]:
    if not name or name != Path(name).name or name.startswith(".") or not name.isprintable():
        return [f"--name: expected a plain file name, got {name!r}"]
    if path.exists() and not (overwrite and path.is_file()):
        return [f"{path}: exists; choose another --name or --out, or give --overwrite"]
    parent = path.parent if path.parent.exists() else nearest_parent(path.parent)
    try:
        # really tried: permission bits say nothing to root, nor about read-only file systems
        with tempfile.TemporaryDirectory(prefix=".heavylift-", dir=parent):
            return []
    except OSError as error:
        return [f"{path}: cannot be written, {parent}: {error.strerror}; change --out"]


def summary(result: dict[str, Any], path: Path) -> str:
    """The block of lines that closes a benchmark."""
    step_s, offload = result["step_s"], result["offload"]
    lines = [
        f"step         {step_s['median']:.3f}s median, {step_s['min']:.3f}-{step_s['max']:.3f}s "
        f"({result['num_steps'] - result['num_warmup_steps']} steps after {result['num_warmup_steps']} of warm-up)",
        f"tokens/s     {result['tokens_per_s']:,.0f}",
        f"tflops       {result['tflops']:.4g} per process (model {result['model_tflops']:.4g})",
        f"peak memory  device {result['peak_device_gib']:.2f}GiB, host {result['peak_host_gib']:.2f}GiB "
        f"(page-locked {result['pinned_gib']:.2f}GiB)",
    ]
    if offload is not None:
        hidden = "-" if offload["hidden"] is None else f"{offload['hidden']:.1%}"
        lines.append(
            f"offload      cpu {offload['cpu_s']:.3f}s, bus {offload['stream_s']:.3f}s per step, hidden {hidden}, "
            f"gates {offload['gate_s'] + offload['drain_s']:.3f}s"
        )
    return "\n".join([*lines, f"written      {path}"])
