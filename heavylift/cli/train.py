"""`heavylift train`: recipe -> checks -> (answer before) -> worker processes -> (answer after).

The order is the point: whatever can be found wrong is found before the model is loaded, and a run that stops on a
user error before its first step leaves nothing behind.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from heavylift.config.model_folder import resolve_model_folder, resolve_tokenizer_folder
from heavylift.config.recipe import dump_recipe, load_recipe
from heavylift.config.run_folder import RunFolder
from heavylift.config.schema import Recipe
from heavylift.errors import EXIT_USER_ERROR, UserError
from heavylift.launch.cores import default_nproc, requested_nproc
from heavylift.launch.runner import RANK_VARIABLES, launch_workers, run_here, started_elsewhere
from heavylift.train.preflight import check, check_processes


def run_train(recipe_path: str, overrides: list[str]) -> int:
    """Trains as the recipe and the `section.key=value` overrides say. Returns the exit code.

    Raises UserError with everything that is wrong with recipe, model folder, data or run folder.
    """
    recipe = load_recipe(recipe_path, overrides)
    if started_elsewhere():
        return _as_one_rank(recipe)
    num_samples = check(recipe, requested_nproc(recipe))
    nproc = default_nproc(recipe)
    check_processes(recipe, num_samples, nproc)
    recipe = resolved(recipe, nproc)
    return _train_and_show(recipe, lambda path: launch_workers(nproc, [path]))


def _as_one_rank(recipe: Recipe) -> int:
    """Under torchrun: rank 0 owns the run folder and speaks, the others only work."""
    first = os.environ["RANK"] == "0"
    check(recipe, int(os.environ["WORLD_SIZE"]), owns_output_dir=first)
    recipe = resolved(recipe, int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])))
    if first:
        return _train_and_show(recipe, lambda path: run_here([path]))
    with tempfile.TemporaryDirectory(prefix="heavylift-") as folder:
        return run_here([write_recipe(recipe, Path(folder))])


def _train_and_show(recipe: Recipe, train: Callable[[str], int]) -> int:
    question = recipe.eval.sample_prompt
    before = None
    if question is not None and recipe.model.init == "pretrained":
        before = _answer(recipe, question, Path(recipe.model.model_name_or_path))
    code = _train_in_folder(recipe, train)
    if code != 0:
        return code
    model = recipe.output_dir / "model"
    if question is not None:
        after = _answer(recipe, question, model)
        print(f"\nquestion: {question}\nbefore:   {before or '(random weights)'}\nafter:    {after}")
    _print_end(recipe, model)
    return code


def _train_in_folder(recipe: Recipe, train: Callable[[str], int]) -> int:
    """Runs `train` with the path of the resolved recipe; the run folder is tidied whatever the end."""
    run_folder = RunFolder(recipe.output_dir)
    code = None
    run_folder.make_room()
    try:
        with tempfile.TemporaryDirectory(prefix="heavylift-") as folder:
            code = train(write_recipe(recipe, Path(folder)))
    except UserError:
        code = EXIT_USER_ERROR
        raise
    finally:
        run_folder.settle(user_error=code == EXIT_USER_ERROR)
    return code


def resolved(recipe: Recipe, nproc: int) -> Recipe:
    """The recipe with hub ids replaced by folders and `auto` by the number of processes."""
    model = {"model_name_or_path": str(resolve_model_folder(recipe))}
    if recipe.model.tokenizer_name_or_path is not None:
        model["tokenizer_name_or_path"] = str(resolve_tokenizer_folder(recipe))
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update=model),
            "launch": recipe.launch.model_copy(update={"nproc": nproc}),
        }
    )


def write_recipe(recipe: Recipe, folder: Path) -> str:
    """Writes the recipe for the workers into `folder`; returns its path. Raises UserError for a disk that refuses."""
    path = folder / "recipe.yaml"
    try:
        path.write_text(dump_recipe(recipe), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; free the disk or set TMPDIR") from None
    return str(path)


def _answer(recipe: Recipe, question: str, model: Path) -> str:
    """The model's answer, from a process of its own: its memory is free again before and after training.

    Raises UserError with what that process says is wrong.
    """
    command = [sys.executable, "-P", "-m", "heavylift", "generate"]
    command += ["--max-new-tokens", str(recipe.eval.sample_max_new_tokens)]
    if recipe.model.tokenizer_name_or_path is not None:
        command += ["--tokenizer", recipe.model.tokenizer_name_or_path]
    if recipe.data.chat_template is not None:
        command += ["--chat-template", recipe.data.chat_template]
    if recipe.model.trust_remote_code:
        command += ["--trust-remote-code"]
    # one process on its own, even where this one is a rank of several
    env = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    done = subprocess.run(
        [*command, "--", str(model), question], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode == EXIT_USER_ERROR:
        problems = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
        raise UserError(*(problems or [f"eval.sample_prompt: {done.stderr.strip()}"]))
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        # training is worth more than this answer
        return f"(no answer: `heavylift generate` ended with exit code {done.returncode})"
    return done.stdout.strip()


def _print_end(recipe: Recipe, model: Path) -> None:
    """Two commands to go on with (the summary above says where the model is)."""
    question = recipe.eval.sample_prompt or "What is the capital of France?"
    again = [
        str(recipe.output_dir / "config.yaml"),
        f"train.output_dir={recipe.output_dir}-2",
        f"train.learning_rate={recipe.train.learning_rate / 2:g}",
    ]
    print("\nnext:")
    if recipe.export.save and recipe.data.format != "random":
        print(f"  heavylift generate {shlex.quote(str(model))} {shlex.quote(question)}")
    print(f"  heavylift train {shlex.join(again)}")
