"""The `heavylift` command: arguments, help, and how errors end. What a command does stands in its own file.

Neither torch nor transformers is imported here: `--help` and a typo in a recipe answer at once. Exit codes: 0 done,
2 the user can fix it (one `error:` line per problem on stderr), 130 interrupted, else a failure with its traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from heavylift.cli.launch import is_launch_line
from heavylift.errors import EXIT_USER_ERROR, UserError
from heavylift.launch.entry import leave
from heavylift.launch.runner import started_elsewhere
from heavylift.launch.screen import keep_running_without_screen

# plain texts: boxes and colours make error messages hard to read in logs
app = typer.Typer(
    help="Fine-tune Hugging Face language models, sharded, with the optimizer in host memory.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_NPROC = "launch.nproc"

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of user errors too.")]


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"heavylift {version('heavylift')}")
        except PackageNotFoundError:
            typer.echo("heavylift (not installed: run from its sources)")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE.yaml", help="The recipe; every key: docs/config.md.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Replace single values.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes on this machine; as launch.nproc.")] = None,
    debug: Debug = False,
) -> None:
    """Train as a recipe says: heavylift train RECIPE.yaml train.max_steps=20"""
    from heavylift.cli.train import run_train

    _end(lambda: run_train(recipe, _with_nproc(overrides or [], nproc)), debug)


@app.command()
def bench(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE.yaml", help="The recipe, mostly with format: random.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Replace single values.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes on this machine; as launch.nproc.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="First steps that the statistics leave out.")] = 3,
    name: Annotated[str | None, typer.Option(help="Of the result; default: the recipe's.")] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where NAME.json goes.")] = Path("benchmarks/results"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an older NAME.json.")] = False,
    debug: Debug = False,
) -> None:
    """Time a recipe's steps and write the numbers: heavylift bench RECIPE.yaml engine.ratio=0.9 --name host"""
    from heavylift.cli.bench import run_bench

    _end(lambda: run_bench(recipe, _with_nproc(overrides or [], nproc), warmup, name, out, overwrite), debug)


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Hugging Face model folder.")],
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length limit of the answer.")] = 64,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of the tokenizer, if not the model's.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="Jinja chat template, if not the tokenizer's.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    debug: Debug = False,
) -> None:
    """Ask a model a question: heavylift generate runs/demo/model "How do I boil an egg?" """
    from heavylift.cli.generate import run_generate

    # there is nothing to tidy up, and Python may swallow a KeyboardInterrupt that falls into an import
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))

    def answer() -> int:
        print(run_generate(model, prompt, max_new_tokens, tokenizer, chat_template, trust_remote_code))
        return 0

    _end(answer, debug)


config_app = typer.Typer(
    help="Read, explain and convert a DeepSpeed configuration.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(config_app, name="config")
DsConfig = Annotated[str, typer.Argument(metavar="DS_CONFIG.json", help="Every key: docs/deepspeed_config.md.")]
WorldSize = Annotated[
    int | None, typer.Option("--world-size", min=1, help="Ranks of the run; default: what the batch keys ask for.")
]


@config_app.command()
def explain(
    config: DsConfig,
    world_size: WorldSize = None,
    model: Annotated[str | None, typer.Option(metavar="FOLDER", help="Show the memory plan of this model.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of the longest sample, for its activations.")] = None,
    debug: Debug = False,
) -> None:
    """Say what a ds_config.json means here, key by key: heavylift config explain ds_config.json"""
    from heavylift.cli.config import run_explain

    _end(lambda: run_explain(config, world_size, model, seq), debug)


@config_app.command("convert")
def convert_config(
    config: DsConfig,
    model: Annotated[str, typer.Option(metavar="FOLDER", help="model.model_name_or_path of the recipe.")],
    dataset: Annotated[str, typer.Option(metavar="FILE", help="data.dataset of the recipe.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The recipe; default: the screen.")] = None,
    output_dir: Annotated[str | None, typer.Option(help="train.output_dir; default: runs/NAME.")] = None,
    world_size: WorldSize = None,
    debug: Debug = False,
) -> None:
    """Write the recipe of a ds_config.json: heavylift config convert ds.json --model M --dataset D -o recipe.yaml"""
    from heavylift.cli.config import run_convert

    _end(lambda: run_convert(config, model, dataset, output, world_size, output_dir), debug)


class _LaunchCommand(TyperCommand):
    """A command whose whole line is the launcher's: its flags are DeepSpeed's, and the script has flags of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


@app.command(cls=_LaunchCommand)
def launch(ctx: typer.Context) -> None:
    """Start a script on every GPU: heavylift launch --num_gpus 4 script.py ARGS (docs/launcher.md)"""
    from heavylift.cli.launch import run_launch

    _end(lambda: run_launch(ctx.args), debug=False)


def _with_nproc(overrides: list[str], nproc: int | None) -> list[str]:
    """The overrides and `--nproc`, which is one more. Raises UserError where they give the key another value: which of
    the two came later is not known here."""
    if nproc is None:
        return overrides
    given = [text.strip() for name, _, text in (one.partition("=") for one in overrides) if name.strip() == _NPROC]
    if given and given[-1] != str(nproc):
        raise UserError(
            f"command line: {_NPROC}: expected one number of processes, got --nproc {nproc} and {_NPROC}={given[-1]}; "
            "remove one of them"
        )
    return [*overrides, f"{_NPROC}={nproc}"]


def _end(command: Callable[[], int], debug: bool) -> None:
    """Runs a command and leaves the process with its exit code."""
    try:
        code = command()
    except UserError as error:
        if debug or os.environ.get("HEAVYLIFT_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        show_problems(error)
        code = EXIT_USER_ERROR
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    raise typer.Exit(code)


def show_problems(error: UserError) -> None:
    """One `error:` line per problem on stderr; under a launcher only one process of the machine speaks."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for problem in error.problems:
        print(f"error: {' '.join(problem.splitlines())}", file=sys.stderr)


def _leave_without_working_folder() -> None:
    """Every command reads paths from there; Python itself only shows a traceback."""
    try:
        os.getcwd()
    except OSError as error:
        print(
            f"error: the working folder cannot be used: {error.strerror}; change into one that is there",
            file=sys.stderr,
        )
        raise SystemExit(EXIT_USER_ERROR) from None


def run() -> None:
    """Entry point of the installed command."""
    keep_running_without_screen()
    _leave_without_working_folder()
    if is_launch_line(sys.argv[1:]):
        sys.argv.insert(1, "launch")
    try:
        app()
    except SystemExit as end:
        if started_elsewhere() and isinstance(end.code, int):
            leave(end.code)  # this process was a rank itself
        raise


if __name__ == "__main__":
    run()
