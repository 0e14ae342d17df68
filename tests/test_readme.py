"""What the documents say: commands parse, files and keys exist, links resolve, recipes load, the quickstart runs."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import typer
import yaml
from conftest import Finished, command_env

from heavylift.cli.main import app
from heavylift.config.recipe import load_recipe
from heavylift.config.words import sections
from heavylift.errors import UserError
from heavylift.train.preflight import check

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "examples").glob("*.yaml"))
TOP_FOLDERS = ("heavylift", "docs", "examples", "tests", "benchmarks", ".ci")
FILE_NAMES = {path.name for folder in TOP_FOLDERS for path in (ROOT / folder).rglob("*")}
# in a command of the documents it stands for the reader's recipe
READERS_RECIPE = "my_run.yaml"

Problems = list[str]


def fences(text: str, language: str) -> list[str]:
    """The code blocks of one language, continued lines joined."""
    return [block.replace("\\\n", " ") for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


def inline_code(text: str) -> list[str]:
    """Everything in single backticks; line breaks inside become spaces."""
    without_blocks = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without_blocks)]


def commands(text: str) -> Iterator[list[str]]:
    """Commands to check, split into words: all lines of shell blocks, and inline code that begins like one."""
    starts = re.compile(r"^(heavylift|make|pip|python -m|torchrun|srun|\.venv/bin/python) ")
    for line in [line for block in fences(text, "bash") for line in block.splitlines()]:
        if line.strip():
            yield shlex.split(line, comments=True)
    for code in inline_code(text):
        if starts.match(code):
            yield shlex.split(code, comments=True)


def command_problems(words: list[str], readers_recipe: Path) -> Problems:
    """What is wrong with one command of the documents."""
    if "-m" in words and words[words.index("-m") + 1] == "heavylift":  # started by torchrun
        words = words[words.index("-m") + 1 :]
    if words[0] == "heavylift":
        return heavylift_problems(words[1:], readers_recipe)
    if words[0] == "make":
        done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        return [] if done.returncode == 0 else [f"{shlex.join(words)}: {done.stderr.strip()}"]
    if words[1:3] == ["-m", "pytest"]:
        markers = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        return [f"unknown marker {word}" for word in words[4:] if f'"{word}: ' not in markers]
    if words[1] == "-m":
        module = ROOT / words[2].replace(".", "/")
        found = module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
        return [] if found else [f"{shlex.join(words)}: no module {words[2]}"]
    if words[0] == "pip":
        return [] if words[1:] == ["install", "-e", "."] else [f"unknown {shlex.join(words)}"]
    return [f"unknown command {shlex.join(words)}"]


def heavylift_problems(args: list[str], readers_recipe: Path) -> Problems:
    """Parses without running; the overrides of `train` must be taken by the recipe."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group | typer.core.TyperGroup)
    try:
        name, command, rest = group.resolve_command(group.make_context("heavylift", list(args)), args)
        assert command is not None
        if not rest:  # the command as such is named
            return []
        params = command.make_context(name, list(rest)).params
    except Exception as error:  # typer brings its own copy of click's exceptions
        return [f"heavylift {shlex.join(args)}: {getattr(error, 'message', error)}"]
    if name != "train":
        return []
    recipe = readers_recipe if READERS_RECIPE in params["recipe"] else ROOT / params["recipe"]
    if re.fullmatch(r"runs/[\w-]+/config\.yaml", params["recipe"]):  # a recipe that a run has written
        recipe = readers_recipe
    try:
        load_recipe(recipe, params["overrides"] or [])
    except UserError as error:
        return [f"heavylift {shlex.join(args)}: {problem}" for problem in error.problems]
    return []


def name_problems(text: str) -> Problems:
    """Files, keys and modules named in inline code that do not exist."""
    problems = []
    for token in [token.strip(",;:()'\"") for code in inline_code(text) for token in code.split()]:
        if token.split("/")[0] in TOP_FOLDERS and "/" in token and "(" not in token:
            if not list(ROOT.glob(token)):
                problems.append(f"no such file: {token}")
        elif token.endswith((".py", ".yaml", ".jsonl", ".md", ".cpp")) and "/" not in token and "*" not in token:
            readers = {READERS_RECIPE, "my_data.jsonl", "metrics.jsonl", "waits.jsonl", "config.yaml"}
            if token not in readers and token not in FILE_NAMES:
                problems.append(f"no such file: {token}")
        elif match := re.fullmatch(r"([a-z]+)\.([a-z_0-9]+)(=.*)?", token):
            section, key = match.group(1), match.group(2)
            if section in sections() and key not in sections()[section].model_fields:
                problems.append(f"no such key: {section}.{key}")
    return problems


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def link_problems(text: str, folder: Path) -> Problems:
    """Relative links to nowhere."""
    problems = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = folder / name if name else None
        if path is not None and not path.exists():
            problems.append(f"link to nothing: {target}")
        elif anchor and anchor not in anchors(text if path is None else path.read_text(encoding="utf-8")):
            problems.append(f"no such heading: {target}")
    return problems


@pytest.fixture
def readers_recipe(tmp_path: Path) -> Path:
    """The recipe of the README's quickstart, as a file."""
    (block,) = fences((ROOT / "README.md").read_text(encoding="utf-8"), "yaml")
    path = tmp_path / READERS_RECIPE
    path.write_text(block, encoding="utf-8")
    return path


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_page_is_true(page: Path, readers_recipe: Path) -> None:
    text = page.read_text(encoding="utf-8")
    problems = [p for words in commands(text) for p in command_problems(words, readers_recipe)]
    assert problems + name_problems(text) + link_problems(text, page.parent) == []


def test_every_document_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)\)", readme)}
    assert {page.resolve() for page in DOCS if page.name != "README.md"} <= linked


def test_the_readme_names_commands_of_every_kind() -> None:
    named = {tuple(words[:2]) for words in commands((ROOT / "README.md").read_text(encoding="utf-8"))}
    wanted = {("make", "demo"), ("make", "test"), ("heavylift", "train"), ("heavylift", "generate")}
    assert wanted <= named, named


def test_the_table_names_tests_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("## What works today")[2].partition("\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) > 10
    for row in table:
        tests = re.findall(r"`(\w+)`", row.rstrip("|").rpartition("|")[2])
        missing = [name for name in tests if not (ROOT / "tests" / f"test_{name}.py").is_file()]
        assert tests and not missing, f"{missing} in {row}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("`heavylift trian x.yaml`", "No such command"),
        ("`heavylift train my_run.yaml --nprocs 2`", "No such option"),
        ("`heavylift train my_run.yaml train.learing_rate=1`", "did you mean train.learning_rate?"),
        ("`heavylift train examples/none.yaml`", "no such file"),
        ("```bash\nmake demmo\n```", "demmo"),
        ("```bash\nrm -rf everything\n```", "unknown command"),
        ("`python -m heavylift.config.referense`", "no module"),
        ("`heavylift/none.py`", "no such file: heavylift/none.py"),
        ("`schemas.py`", "no such file: schemas.py"),
        ("`train.step`", "no such key: train.step"),
        ("[x](docs/none.md)", "link to nothing"),
        ("[x](README.md#none)", "no such heading"),
    ],
)
def test_a_false_page_is_found_out(text: str, problem: str, readers_recipe: Path) -> None:
    found = [p for words in commands(text) for p in command_problems(words, readers_recipe)]
    found += name_problems(text) + link_problems(text, ROOT)
    assert problem in " ".join(found)


def test_links_to_headings_resolve() -> None:
    assert link_problems("# A title, `x`!\n[a](#a-title-x) [b](docs/data.md#what-is-trained)", ROOT) == []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_recipe_loads_and_opens_with_its_facts(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers_recipe: Path
) -> None:
    monkeypatch.chdir(ROOT)
    name = recipe.relative_to(ROOT)
    header = "".join(line for line in recipe.read_text(encoding="utf-8").splitlines(True) if line.startswith("# "))
    assert f"heavylift train {name}\n" in header and "# hardware: " in header and "# expected: " in header
    loaded = load_recipe(name, [f"train.output_dir={tmp_path / 'run'}"])
    if Path(loaded.model.model_name_or_path).is_dir():  # the demo's model is made by `make demo`
        assert check(loaded, nproc=8) >= 8
    else:
        assert loaded.model.model_name_or_path.startswith(".cache/")


PLANS = """
import re, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from heavylift.config.recipe import load_recipe
from heavylift.memory.activations import LayerShape
from heavylift.memory.planner import ModelPlanner
from heavylift.models.load import build_on_meta, load_hf_config
from heavylift.sharding import make_mesh, shard_model
from heavylift.train.setup import prepare_head, tiered_options, workload

for path in sys.argv[1:]:
    recipe = load_recipe(path)
    (world,) = re.findall(r"^# plan: (\\d+) processes:", Path(path).read_text(), re.M)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(world))
    hf_config = load_hf_config(Path(recipe.model.model_name_or_path), False)
    model = build_on_meta(hf_config, recipe.model, torch.bfloat16)
    prepare_head(model, recipe.train, 0)
    sharded = shard_model(model, recipe.engine.zero_stage, make_mesh(recipe.engine.zero_stage, "cpu"))
    options = tiered_options(recipe, [0])
    work = workload(recipe, recipe.data.cutoff_len, model, torch.device("cuda"))
    plan = ModelPlanner(sharded, LayerShape.from_config(hf_config), torch.bfloat16).plan(options, work)
    host_gib = plan.host_bytes * int(world) / 2**30
    print(f"# plan: {world} processes: {plan.device_bytes / 2**30:.1f} GiB on each GPU at the peak, "
          f"{host_gib:.0f} GiB of host memory on the machine")
    dist.destroy_process_group()
"""


def test_plan_lines_of_the_recipes_are_the_plans() -> None:
    """For the stated number of processes, without starting them: torch's fake process group, model on meta."""
    paths = [path for path in RECIPES if "\n# plan: " in path.read_text(encoding="utf-8")]
    assert len(paths) == 3
    done = subprocess.run(
        [sys.executable, "-c", PLANS, *(str(path.relative_to(ROOT)) for path in paths)],
        cwd=ROOT,
        env=command_env(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    written = [re.findall(r"^# plan: .*$", path.read_text(encoding="utf-8"), re.MULTILINE)[0] for path in paths]
    assert done.stdout.splitlines() == written


def test_the_quickstart_runs(
    run_heavylift: Callable[..., Finished], readers_recipe: Path, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """The README's recipe and commands as they stand, but for the model and the number of rows."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = fences(readme, "json")
    (tmp_path / "my_data.jsonl").write_text(row * 20, encoding="utf-8")
    blocks = [[shlex.split(line, comments=True) for line in block.splitlines()] for block in fences(readme, "bash")]
    train, generate = next(block for block in blocks if block[0][0] == "heavylift")
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    trained = run_heavylift(
        *train[1:], f"model.model_name_or_path={tiny_llama_dir}", "--nproc", "2", cwd=tmp_path, env=env
    )
    assert trained.rc == 0, trained.stderr
    run = tmp_path / "runs" / "my_run"
    listed = re.findall(r"^\* `([\w./]+)`:", readme, re.MULTILINE)
    assert sorted(path.name + "/" * path.is_dir() for path in run.iterdir()) == sorted(listed)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    # 18 samples in steps of 2 x 4 x 2, twice; evaluated before and after
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4]
    assert [record["step"] for record in records if "eval_loss" in record] == [0, 4]
    assert yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["train"]["num_train_epochs"] == 2
    answer = run_heavylift(*generate[1:], "--max-new-tokens", "4", cwd=tmp_path, env=env)
    assert answer.rc == 0, answer.stderr


@pytest.mark.soak
def test_a_random_recipe_runs_on_a_small_shape(run_heavylift: Callable[..., Finished], tmp_path: Path) -> None:
    """And its first loss is the one that the headers of these recipes foretell."""
    hidden, vocab = 128, 512  # of the shape tiny_llama
    ended = run_heavylift(
        "train",
        "examples/llama_3_1_8b_random.yaml",
        "model.model_name_or_path=examples/shapes/tiny_llama",
        f"train.output_dir={tmp_path / 'run'}",
        "train.max_steps=2",
        "data.cutoff_len=64",
        "data.num_samples=16",
        "--nproc=2",
        cwd=ROOT,
    )
    assert ended.rc == 0, ended.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["tokens"] for record in records] == [2 * 4 * 64] * 2
    # the standard error over 504 tokens is below 0.02
    assert records[0]["loss"] == pytest.approx(math.log(vocab) + hidden * 0.02**2 / 2, abs=0.1)


@pytest.mark.parametrize("recipe", [path for path in RECIPES if "_random" in path.name], ids=lambda path: path.name)
def test_foretold_loss_follows_from_the_shape(recipe: Path) -> None:
    text = recipe.read_text(encoding="utf-8")
    shape = json.loads((ROOT / "examples" / "shapes" / recipe.stem.removesuffix("_random") / "config.json").read_text())
    loss = math.log(shape["vocab_size"]) + shape["hidden_size"] * shape["initializer_range"] ** 2 / 2
    assert f"/ 2 = {loss:.1f};" in text
