"""Bad input that only the model, the tokenizer or the disk can show: one line per problem, nothing left behind.

Where it ends the whole command: exit code 2, no traceback.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Finished, command_env, heavylift_command
from ranks.pool import run_on_ranks

from heavylift.config.recipe import load_recipe
from heavylift.errors import UserError
from heavylift.train.preflight import check

Write = Callable[..., Path]
Run = Callable[..., Finished]
Refused = Callable[[Path], list[str]]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """`refused(recipe)` sets the run up on the recipe's ranks, as the command's workers do; returns what is said."""

    def run(recipe: Path) -> list[str]:
        before = {path for path in tmp_path.rglob("*")}
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))
        nproc = load_recipe(recipe).launch.nproc
        assert isinstance(nproc, int)
        check(load_recipe(recipe), nproc=nproc)  # the command's own process finds nothing
        problems, *others = run_on_ranks(nproc, set_up_job, recipe, tmp_path.parent / "cache")
        assert all(other == problems for other in others)
        assert {path for path in tmp_path.rglob("*")} == before
        return problems

    return run


def set_up_job(recipe: Path, cache: Path) -> list[str]:
    """What keeps the run from being set up."""
    from heavylift.train import setup

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as caught:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setattr(setup, "start_process_group", lambda ranks: None)  # the pool has one
        setup.set_up(load_recipe(recipe))
    return list(caught.value.problems)


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder: Path, change: Callable[[dict], None]) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_sample_longer_than_the_model_allows(refused: Refused, write_recipe: Write, tiny_llama_copy: Path) -> None:
    change_config(tiny_llama_copy, max_position_embeddings=24)
    lines = refused(write_recipe(model={"model_name_or_path": str(tiny_llama_copy)}))
    assert "chat.jsonl:1" in lines[0] and "24" in lines[0] and "data.overlong" in lines[0]


def test_missing_tensor(refused: Refused, write_recipe: Write, tiny_llama_copy: Path) -> None:
    def drop(tensors: dict) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        del tensors["lm_head.weight"]  # the config says that it is not tied

    change_weights(tiny_llama_copy, drop)
    lines = refused(write_recipe(model={"model_name_or_path": str(tiny_llama_copy)}))
    assert len(lines) == 2
    assert "model.layers.1.mlp.up_proj.weight (64, 32) is not in any safetensors file" in lines[0]
    assert "lm_head.weight" in lines[1]


def test_more_layers_in_the_weights_than_in_the_config(
    refused: Refused, write_recipe: Write, tiny_llama_copy: Path
) -> None:
    change_config(tiny_llama_copy, num_hidden_layers=1)
    [line] = refused(write_recipe(model={"model_name_or_path": str(tiny_llama_copy)}))
    assert "9 tensors have no place in the model of config.json, the first is model.layers.1." in line


def test_wrong_shape_told_once_by_two_ranks(
    run_heavylift: Run, write_recipe: Write, tiny_llama_copy: Path, tmp_path: Path
) -> None:
    """Through the command: exit code 2, one line per problem whatever the number of ranks, nothing left behind."""
    change_config(tiny_llama_copy, intermediate_size=60)
    recipe = write_recipe(model={"model_name_or_path": str(tiny_llama_copy)}, launch={"nproc": 2})
    before = {path for path in tmp_path.rglob("*")}
    done = run_heavylift("train", recipe, env={"XDG_CACHE_HOME": str(tmp_path.parent / "cache")})
    assert done.rc == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert all(line.startswith("error: ") for line in done.stderr.strip().splitlines()), done.stderr
    assert {path for path in tmp_path.rglob("*")} == before
    assert len(done.errors) == 6  # gate, up and down of two layers
    assert "gate_proj.weight has shape (64, 32), config.json asks for (60, 32)" in done.errors[0]


def test_tokenizer_larger_than_the_embedding(refused: Refused, write_recipe: Write, tiny_llama_copy: Path) -> None:
    change_config(tiny_llama_copy, vocab_size=50)

    def cut(tensors: dict) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:50].clone()

    change_weights(tiny_llama_copy, cut)
    (line,) = refused(write_recipe(model={"model_name_or_path": str(tiny_llama_copy)}))
    assert "only 50 rows" in line and "model.tokenizer_name_or_path" in line


def test_freeze_pattern_that_matches_nothing(refused: Refused, write_recipe: Write) -> None:
    (line,) = refused(write_recipe(model={"freeze": ["model.layers.*", "transformer.h.*"]}))
    assert line.startswith("model.freeze: 'transformer.h.*' matches no parameter")


def test_everything_frozen(refused: Refused, write_recipe: Write) -> None:
    (line,) = refused(write_recipe(model={"freeze": ["*"]}, launch={"nproc": 2}))
    assert line == "model.freeze: every parameter is frozen; nothing is left to train"


def test_config_of_no_causal_model(refused: Refused, write_recipe: Write, tiny_llama_copy: Path) -> None:
    change_config(tiny_llama_copy, model_type="vit", architectures=["ViTModel"])
    (line,) = refused(write_recipe(model={"model_name_or_path": str(tiny_llama_copy)}))
    assert str(tiny_llama_copy) in line


# ---- the disk fills up --------------------------------------------------------------------------------------------


def run_with_file_limit(limit_kib: int, recipe: Path, *overrides: str) -> Finished:
    """The command in a shell that lets no file grow beyond `limit_kib`: writes really fail, as on a full disk."""
    command = ["bash", "-c", f'ulimit -f {limit_kib}; exec "$@"', "bash", *heavylift_command(), "train", str(recipe)]
    done = subprocess.run(
        [*command, *overrides], env=command_env(), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("nproc", "limit_kib", "export", "what"),
    [
        pytest.param(2, 100, {"dtype": "float32"}, "model.safetensors", id="weights"),
        pytest.param(
            *(1, 16, {"dtype": "float32", "max_shard_size": "5KB"}, "model-00001-of-"),
            id="first_of_many",
            marks=pytest.mark.soak,
        ),
        pytest.param(1, 48, {"dtype": "bfloat16", "max_shard_size": "30KB"}, "tokenizer", id="tokenizer"),
    ],
)
def test_disk_full_while_saving(
    nproc: int, limit_kib: int, export: dict, what: str, write_recipe: Write, tmp_path: Path, tiny_llama_copy: Path
) -> None:
    if what == "tokenizer":
        # larger than the limit, while the weights stay below; its library (in Rust) raises errors of its own
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tiny_llama_copy)
        tokenizer.add_tokens(["x" * 60_000])
        tokenizer.save_pretrained(tiny_llama_copy)
    recipe = write_recipe(export=export, model={"model_name_or_path": str(tiny_llama_copy)}, launch={"nproc": nproc})
    done = run_with_file_limit(limit_kib, recipe)
    assert done.rc == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = done.errors
    assert what in line and "cannot be written" in line and "train.output_dir" in line
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {"metrics.jsonl", "config.yaml"}
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_pictures_that_cannot_be_written_do_not_end_a_run(write_recipe: Write, tmp_path: Path) -> None:
    recipe = write_recipe(export={"save": False}, train={"profile": True, "max_steps": 2})
    done = run_with_file_limit(8, recipe)
    assert done.rc == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith(str(tmp_path))]
    assert [line.partition(": cannot be written: ")[0] for line in lines] == [
        str(tmp_path / "run" / name) for name in ("trace.json", "loss.png")
    ]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"metrics.jsonl", "config.yaml"}
    assert "loss         " in done.stdout
