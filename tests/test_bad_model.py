"""Bad input that only the model, the tokenizer or the disk can show, through the real command: exit code 2, one line
per problem, no traceback, nothing left behind."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Finished, command_env, heavylift_command

Write = Callable[..., Path]
Run = Callable[..., Finished]


@pytest.fixture
def refused(run_heavylift: Run, tmp_path: Path) -> Callable[..., list[str]]:
    """`refused(recipe, *overrides)` runs `heavylift train`, checks how it ends and returns its error lines."""

    def run(recipe: Path, *overrides: str) -> list[str]:
        before = {path for path in tmp_path.rglob("*")}
        done = run_heavylift("train", recipe, *overrides, env={"XDG_CACHE_HOME": str(tmp_path.parent / "cache")})
        assert done.rc == 2, done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        assert done.errors and all(line.startswith("error: ") for line in done.stderr.strip().splitlines()), done.stderr
        assert {path for path in tmp_path.rglob("*")} == before
        return done.errors

    return run


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder: Path, change: Callable[[dict], None]) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_sample_longer_than_the_model_allows(refused: Callable, write_recipe: Write, tiny_llama_copy: Path) -> None:
    change_config(tiny_llama_copy, max_position_embeddings=24)
    lines = refused(write_recipe(model={"model_name_or_path": str(tiny_llama_copy)}))
    assert "chat.jsonl:1" in lines[0] and "24" in lines[0] and "data.overlong" in lines[0]


def test_missing_tensor(refused: Callable, write_recipe: Write, tiny_llama_copy: Path) -> None:
    def drop(tensors: dict) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        del tensors["lm_head.weight"]  # the config says that it is not tied

    change_weights(tiny_llama_copy, drop)
    lines = refused(write_recipe(model={"model_name_or_path": str(tiny_llama_copy)}))
    assert len(lines) == 2
    assert "model.layers.1.mlp.up_proj.weight (64, 32) is not in any safetensors file" in lines[0]
    assert "lm_head.weight" in lines[1]


def test_more_layers_in_the_weights_than_in_the_config(
    refused: Callable, write_recipe: Write, tiny_llama_copy: Path
) -> None:
    change_config(tiny_llama_copy, num_hidden_layers=1)
    [line] = refused(write_recipe(model={"model_name_or_path": str(tiny_llama_copy)}))
    assert "9 tensors have no place in the model of config.json, the first is model.layers.1." in line


def test_wrong_shape_told_once_by_two_ranks(refused: Callable, write_recipe: Write, tiny_llama_copy: Path) -> None:
    change_config(tiny_llama_copy, intermediate_size=60)
    lines = refused(write_recipe(model={"model_name_or_path": str(tiny_llama_copy)}, launch={"nproc": 2}))
    assert len(lines) == 6  # gate, up and down of two layers
    assert "gate_proj.weight has shape (64, 32), config.json asks for (60, 32)" in lines[0]


def test_tokenizer_larger_than_the_embedding(refused: Callable, write_recipe: Write, tiny_llama_copy: Path) -> None:
    change_config(tiny_llama_copy, vocab_size=50)

    def cut(tensors: dict) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:50].clone()

    change_weights(tiny_llama_copy, cut)
    (line,) = refused(write_recipe(model={"model_name_or_path": str(tiny_llama_copy)}))
    assert "only 50 rows" in line and "model.tokenizer_name_or_path" in line


def test_freeze_pattern_that_matches_nothing(refused: Callable, write_recipe: Write) -> None:
    (line,) = refused(write_recipe(model={"freeze": ["model.layers.*", "transformer.h.*"]}))
    assert line.startswith("model.freeze: 'transformer.h.*' matches no parameter")


def test_everything_frozen(refused: Callable, write_recipe: Write) -> None:
    (line,) = refused(write_recipe(model={"freeze": ["*"]}, launch={"nproc": 2}))
    assert line == "model.freeze: every parameter is frozen; nothing is left to train"


def test_config_of_no_causal_model(refused: Callable, write_recipe: Write, tiny_llama_copy: Path) -> None:
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
        (2, 100, {"dtype": "float32"}, "model.safetensors"),
        (1, 16, {"dtype": "float32", "max_shard_size": "5KB"}, "model-00001-of-"),
        (1, 48, {"dtype": "bfloat16", "max_shard_size": "30KB"}, "tokenizer"),
    ],
    ids=["weights", "first_of_many", "tokenizer"],
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
