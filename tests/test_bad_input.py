"""Every bad input, through the real command: exit code 2, one `error:` line per problem, no traceback, nothing left.

What needs the model loaded (too long samples, shapes against the config, a full disk) stands with the trainer's tests.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Finished

from heavylift.config.model_folder import INDEX, read_weights
from heavylift.config.recipe import load_recipe
from heavylift.errors import UserError
from heavylift.train.preflight import check

Run = Callable[..., Finished]
Write = Callable[..., Path]


@pytest.fixture
def refused(run_heavylift: Run, tmp_path: Path) -> Callable[..., list[str]]:
    """Runs `heavylift train` on a bad recipe; returns the error lines with the folder's name taken off."""

    def run(recipe: Path, *args: str, env: dict[str, str] | None = None) -> list[str]:
        before = sorted(str(path) for path in tmp_path.rglob("*"))
        ended = run_heavylift("train", recipe, *args, env=env)
        assert ended.rc == 2, ended
        assert "Traceback" not in ended.stdout + ended.stderr
        assert ended.stderr.splitlines() == [f"error: {line}" for line in ended.errors], ended.stderr
        assert sorted(str(path) for path in tmp_path.rglob("*")) == before
        return [line.replace(f"{tmp_path}/", "") for line in ended.errors]

    return run


Refused = Callable[..., list[str]]


def one(lines: list[str]) -> str:
    assert len(lines) == 1, lines
    return lines[0]


def test_the_recipe_itself_is_good(write_recipe: Write) -> None:
    assert check(load_recipe(write_recipe()), nproc=8) == 8


# the recipe


def test_missing_recipe(refused: Refused, tmp_path: Path) -> None:
    assert one(refused(tmp_path / "none.yaml")) == "none.yaml: no such file; give the path of a recipe (YAML)"


def test_problems_of_the_recipe_come_all_at_once(refused: Refused, write_recipe: Write) -> None:
    recipe = write_recipe(train={"learing_rate": 1e-3, "max_steps": "two"})
    lines = refused(recipe, "train.seed=x", "--nproc", "2")
    assert [line.split(": ", 1)[1] for line in lines] == [
        "train.max_steps: expected a whole number ≥ 1, got 'two'",
        "train.learing_rate: unknown key; did you mean train.learning_rate?",
        "train.seed: expected a whole number ≥ 0 and < 4294967296, got 'x'",
    ]
    assert lines[0].startswith("recipe.yaml:") and lines[2].startswith("command line: ")


def test_a_user_error_comes_in_one_line_unless_asked(run_heavylift: Run, tmp_path: Path) -> None:
    quiet = run_heavylift("train", tmp_path / "none.yaml")
    assert len(quiet.stderr.splitlines()) == 1
    for ended in (
        run_heavylift("train", tmp_path / "none.yaml", "--debug"),
        run_heavylift("train", tmp_path / "none.yaml", env={"HEAVYLIFT_DEBUG": "1"}),
    ):
        assert ended.rc == 2 and "Traceback" in ended.stderr
        assert ended.errors == quiet.errors


# the data


def rows_refused(refused: Refused, write_recipe: Write, folder: Path, *rows: object) -> list[str]:
    """Writes rows (strings as they are) and returns what is said about them."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "bad.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return refused(write_recipe(data={"dataset": str(folder / "bad.jsonl")}))


def turns(*pairs: tuple[str, str]) -> dict[str, object]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


GOOD_ROW = turns(("user", "hi"), ("assistant", "ho"))


def test_missing_data_file(refused: Refused, write_recipe: Write, tmp_path: Path) -> None:
    recipe = write_recipe(data={"dataset": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]})
    lines = refused(recipe)
    assert len(lines) == 2
    assert lines[0].startswith("a.jsonl: no such file") and "data.dataset" in lines[0]


def test_broken_json_names_file_and_line(refused: Refused, write_recipe: Write, tmp_path: Path) -> None:
    line = one(rows_refused(refused, write_recipe, tmp_path, GOOD_ROW, "", '{"messages": [', GOOD_ROW))
    assert line.startswith("bad.jsonl:3: ")


def test_unknown_role(refused: Refused, write_recipe: Write, tmp_path: Path) -> None:
    row = turns(("user", "hi"), ("asistant", "ho"))
    line = one(rows_refused(refused, write_recipe, tmp_path, GOOD_ROW, row))
    assert line.startswith("bad.jsonl:2: ") and "asistant" in line and "assistant" in line


def test_no_assistant_turn(refused: Refused, write_recipe: Write, tmp_path: Path) -> None:
    line = one(rows_refused(refused, write_recipe, tmp_path, turns(("user", "hi"))))
    assert line.startswith("bad.jsonl:1: ") and "assistant" in line


def test_empty_data_set(refused: Refused, write_recipe: Write, tmp_path: Path) -> None:
    assert "empty data set" in one(rows_refused(refused, write_recipe, tmp_path))


def test_more_processes_than_samples(refused: Refused, write_recipe: Write) -> None:
    said = "launch.nproc: 9 processes, but 8 training samples; use fewer or add data"
    assert one(refused(write_recipe(), "--nproc", "9")) == said
    held_out = "launch.nproc: 4 processes, but 2 training samples; use fewer or add data"
    assert one(refused(write_recipe(data={"val_size": 6}), "--nproc", "4")) == held_out
    last = "launch.nproc: 2 processes, but 1 training sample; use fewer or add data"
    assert one(refused(write_recipe(data={"val_size": 7}), "--nproc", "2")) == last


@pytest.mark.parametrize("command", ["train", "bench"])
@pytest.mark.parametrize("overrides", [["launch.nproc=1"], ["launch.nproc=2", " launch.nproc = auto "]])
def test_nproc_given_twice(run_heavylift: Run, write_recipe: Write, command: str, overrides: list[str]) -> None:
    ended = run_heavylift(command, write_recipe(), "--nproc", "2", *overrides)
    assert ended.rc == 2 and ended.stdout == ""
    assert ended.errors == [
        "command line: launch.nproc: expected one number of processes, got --nproc 2 and "
        f"launch.nproc={overrides[-1].partition('=')[2].strip()}; remove one of them"
    ]


def test_nproc_given_twice_alike_or_in_the_recipe(refused: Refused, write_recipe: Write) -> None:
    said = "launch.nproc: 9 processes, but 8 training samples; use fewer or add data"
    assert one(refused(write_recipe(), "--nproc", "9", "launch.nproc=9")) == said
    assert one(refused(write_recipe(launch={"nproc": 1}), "--nproc", "9")) == said


def test_everything_held_out(refused: Refused, write_recipe: Write) -> None:
    line = one(refused(write_recipe(data={"val_size": 8})))
    assert line == "data.val_size: 8.0 holds out all of 8 samples; choose a smaller one"


def test_missing_chat_template(refused: Refused, write_recipe: Write, tmp_path: Path) -> None:
    line = one(refused(write_recipe(data={"chat_template": str(tmp_path / "none.jinja")})))
    assert line.startswith("none.jinja: ") and "data.chat_template" in line


# the model folder


def test_missing_model_folder(refused: Refused, write_recipe: Write, tmp_path: Path) -> None:
    line = one(refused(write_recipe(model={"model_name_or_path": str(tmp_path / "nothing")})))
    assert line == "nothing: no such model folder; change model.model_name_or_path"


def test_unreachable_hub_id(refused: Refused, write_recipe: Write, tmp_path: Path) -> None:
    recipe = write_recipe(model={"model_name_or_path": "some-org/some-model"})
    line = one(refused(recipe, env={"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}))
    assert line.startswith("some-org/some-model: no such folder, and it cannot be fetched from the Hugging Face hub: ")


def damaged(refused: Refused, write_recipe: Write, folder: Path, **sections: dict[str, object]) -> list[str]:
    return refused(write_recipe(**{"model": {"model_name_or_path": str(folder)}, **sections}))


def test_no_config(refused: Refused, write_recipe: Write, tiny_llama_copy: Path) -> None:
    (tiny_llama_copy / "config.json").unlink()
    line = one(damaged(refused, write_recipe, tiny_llama_copy))
    assert line.startswith("tiny_llama: no config.json")


def test_broken_config(refused: Refused, write_recipe: Write, tiny_llama_copy: Path) -> None:
    (tiny_llama_copy / "config.json").write_text('{\n"model_type": llama}')
    line = one(damaged(refused, write_recipe, tiny_llama_copy))
    assert line.startswith("tiny_llama/config.json:2:15: broken JSON")


def test_config_without_architecture(refused: Refused, write_recipe: Write, tiny_llama_copy: Path) -> None:
    (tiny_llama_copy / "config.json").write_text("{}")
    assert "`model_type` is missing" in one(damaged(refused, write_recipe, tiny_llama_copy))


def test_config_without_weights(refused: Refused, write_recipe: Write, tiny_llama_copy: Path) -> None:
    (tiny_llama_copy / "model.safetensors").unlink()
    line = one(damaged(refused, write_recipe, tiny_llama_copy))
    assert line == "tiny_llama: no *.safetensors; put the weights there or set model.init to random"
    random = write_recipe(model={"model_name_or_path": str(tiny_llama_copy), "init": "random"})
    assert check(load_recipe(random), nproc=1) == 8


def test_pickled_weights(refused: Refused, write_recipe: Write, tiny_llama_copy: Path) -> None:
    (tiny_llama_copy / "model.safetensors").rename(tiny_llama_copy / "pytorch_model.bin")
    assert "pickle is never loaded: convert to safetensors" in one(damaged(refused, write_recipe, tiny_llama_copy))


def test_truncated_weights(refused: Refused, write_recipe: Write, tiny_llama_copy: Path) -> None:
    weights = tiny_llama_copy / "model.safetensors"
    whole = weights.stat().st_size
    os.truncate(weights, whole - 10)
    line = one(damaged(refused, write_recipe, tiny_llama_copy))
    assert line.startswith(f"tiny_llama/model.safetensors: expected {whole:,} bytes, got {whole - 10:,}: truncated")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        struct.pack("<Q", 10**15) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 12) + b'{"a": "b"}  ',
        struct.pack("<Q", 3) + b"{x}",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 99\n",
    ],
)
def test_broken_weights(tiny_llama_copy: Path, content: bytes) -> None:
    (tiny_llama_copy / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors: broken.* safetensors"):
        read_weights(tiny_llama_copy)


def test_index_with_missing_files(refused: Refused, write_recipe: Write, tiny_llama_copy: Path) -> None:
    weight_map = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (tiny_llama_copy / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    line = one(damaged(refused, write_recipe, tiny_llama_copy))
    assert line == f"tiny_llama/{INDEX}: model-2.safetensors is not in the folder; get it anew"


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, "expected plain file names"),
        ({"weight_map": {"not.there": "model.safetensors"}}, "names tensors that no file holds: not.there"),
        ({"weight_map": [1]}, "expected a `weight_map`"),
        ({}, "expected a `weight_map`"),
    ],
)
def test_bad_index(tiny_llama_copy: Path, index: object, said: str) -> None:
    (tiny_llama_copy / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=said):
        read_weights(tiny_llama_copy)


def test_number_of_parameters_from_the_headers(tiny_llama_dir: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(tiny_llama_dir / "model.safetensors")
    assert read_weights(tiny_llama_dir).num_params == sum(tensor.numel() for tensor in tensors.values())


def test_no_tokenizer(refused: Refused, write_recipe: Write, tiny_llama_copy: Path) -> None:
    (tiny_llama_copy / "tokenizer.json").unlink()
    line = one(damaged(refused, write_recipe, tiny_llama_copy))
    assert line.startswith("tiny_llama: no tokenizer") and "model.tokenizer_name_or_path" in line
    random = {"dataset": None, "format": "random", "cutoff_len": 8, "num_samples": 4}
    recipe = write_recipe(model={"model_name_or_path": str(tiny_llama_copy)}, data=random)
    assert check(load_recipe(recipe), nproc=1) == 4


def test_tokenizer_without_chat_template(refused: Refused, write_recipe: Write, tiny_llama_copy: Path) -> None:
    (tiny_llama_copy / "chat_template.jinja").unlink()
    line = one(damaged(refused, write_recipe, tiny_llama_copy))
    assert line.startswith("tiny_llama: the tokenizer has no chat template") and "data.chat_template" in line


def test_cutoff_beyond_the_positions(refused: Refused, write_recipe: Write) -> None:
    line = one(refused(write_recipe(data={"cutoff_len": 129})))
    assert line.startswith("data.cutoff_len: 129 tokens are more than the model allows (max_position_embeddings 128")


# the run folder


def test_output_folder_exists(refused: Refused, write_recipe: Write, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    line = one(refused(write_recipe()))
    assert line == "run: exists; choose another train.output_dir or set train.overwrite_output_dir=true"
    line = one(refused(write_recipe(), "train.overwrite_output_dir=true"))
    assert line.startswith("run: exists and is no heavylift run folder, so it is not overwritten")


def test_somebody_elses_config_is_no_run_folder(refused: Refused, write_recipe: Write, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("homeassistant: {name: home}\n")
    line = one(refused(write_recipe(), "train.overwrite_output_dir=true"))
    assert "no heavylift run folder" in line


def test_overwriting_the_model_that_is_trained(
    refused: Refused, write_recipe: Write, tmp_path: Path, tiny_llama_dir: Path
) -> None:
    shutil.copytree(tiny_llama_dir, tmp_path / "run" / "model")
    (tmp_path / "run" / "config.yaml").write_text("model: {}\ndata: {}\ntrain: {}\n")
    recipe = write_recipe(model={"model_name_or_path": str(tmp_path / "run" / "model")})
    line = one(refused(recipe, "train.overwrite_output_dir=true"))
    assert line.startswith("run/model: lies in the run folder that would be overwritten")


def test_output_folder_is_a_file_or_below_one(refused: Refused, write_recipe: Write, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    line = one(refused(write_recipe(train={"output_dir": str(tmp_path / "file")})))
    assert line.startswith("file: expected a folder or nothing")
    line = one(refused(write_recipe(train={"output_dir": str(tmp_path / "file" / "run")})))
    assert line.startswith("file/run: cannot be made, file is a file")


def test_output_folder_cannot_be_made(refused: Refused, write_recipe: Write) -> None:
    line = one(refused(write_recipe(train={"output_dir": "/proc/run"})))
    assert line.startswith("/proc/run: cannot be made, /proc is not writable")


def test_empty_output_folder_is_welcome(write_recipe: Write, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert check(load_recipe(write_recipe()), nproc=1) == 8


def test_disk_too_small(write_recipe: Write, tiny_llama_copy: Path) -> None:
    # a header that promises more than any disk holds; only the size of the sparse file is real
    elements = 2**42
    header = json.dumps({"a": {"dtype": "U8", "shape": [elements], "data_offsets": [0, elements]}}).encode()
    weights = tiny_llama_copy / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(weights, 8 + len(header) + elements)
    with pytest.raises(UserError, match=r"the trained model takes 8796\.13 GB, .* free the disk or choose another"):
        check(load_recipe(write_recipe(model={"model_name_or_path": str(tiny_llama_copy)})), nproc=1)


def test_problems_of_all_kinds_come_together(refused: Refused, write_recipe: Write, tiny_llama_copy: Path) -> None:
    (tiny_llama_copy / "model.safetensors").unlink()
    (tiny_llama_copy / "tokenizer.json").unlink()
    recipe = write_recipe(
        model={"model_name_or_path": str(tiny_llama_copy)},
        data={"dataset": "/nowhere.jsonl", "cutoff_len": 1000},
        train={"output_dir": "/proc/run"},
    )
    lines = refused(recipe)
    assert len(lines) == 5, lines
