"""The exported folder: the same logits, ties kept, several files, valid for everybody, and little memory on the way;
and reading a folder: each rank only its slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.llamas import llama_config, save_llama_config
from ranks.memory import Growth, measure
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import make_steps
from ranks.pool import run_on_fresh_ranks, run_on_ranks
from ranks.sharded import Setup, build, take_step, whole_weights
from safetensors import safe_open

from heavylift.checkpoint.huggingface import save_model
from heavylift.config.schema import ModelConfig
from heavylift.errors import UserError
from heavylift.models.load import build_on_meta, init_random_weights, load_hf_config, load_weights, materialise
from heavylift.sharding import make_mesh, shard_model

STEPS = make_steps(2, VOCAB)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Odd Llama by whether its embedding is tied."""
    root = tmp_path_factory.mktemp("models")
    return {tied: save_odd_llama(root / str(tied), tied) for tied in (False, True)}


def train_and_export_job(folder: Path, setup: Setup, out: Path, dtype: str, max_bytes: int) -> dict[str, Any]:
    """Two steps, then the export; weights and logits in memory, and logits of the reopened folder (rank 0)."""
    from transformers import AutoModelForCausalLM

    engine = build(folder, setup)
    for rows in STEPS:
        take_step(engine, rows)
    weights = whole_weights(engine)
    engine.module.eval()
    with torch.no_grad():
        logits = engine.module(input_ids=STEPS[0].input_ids, use_cache=False).logits
    engine.sharded.reshard()
    hf_config = load_hf_config(folder, False)
    save_model(engine.module, out, hf_config=hf_config, tokenizer=None, dtype=dtype, max_shard_bytes=max_bytes)
    dist.barrier()
    reopened = AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        again = reopened(input_ids=STEPS[0].input_ids, use_cache=False).logits
    return {"weights": weights, "logits": logits, "again": again, "dtype": reopened.dtype}


def stored(folder: Path) -> Tensors:
    """All tensors of a folder's safetensors files, read by the safetensors library."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():
                assert name not in tensors, f"{name} is stored twice"
                tensors[name] = file.get_tensor(name)
    return tensors


@pytest.mark.parametrize(
    ("world", "stage", "tied"), [(1, 3, True), (2, 0, True), (2, 1, False), (2, 3, False), (2, 3, True), (4, 3, False)]
)
def test_float32_export_is_the_model_in_memory(
    world: int, stage: int, tied: bool, folders: dict[bool, Path], tmp_path: Path
) -> None:
    setup = Setup(stage=stage, ratio=0.5)
    args = (folders[tied], setup, tmp_path / "model", "float32", 10**9)
    result = run_on_ranks(world, train_and_export_job, *args)[0]
    assert torch.equal(result["logits"], result["again"])
    on_disk = stored(tmp_path / "model")
    assert on_disk.keys() == result["weights"].keys()
    assert ("lm_head.weight" in on_disk) is not tied
    assert all(torch.equal(on_disk[name], weight) for name, weight in result["weights"].items())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def refused_export_job(folder: Path, out: Path) -> str:
    """Over a folder that is there."""
    engine = build(folder, Setup())
    hf_config = load_hf_config(folder, False)
    with pytest.raises(UserError) as caught:
        save_model(engine.module, out, hf_config=hf_config, tokenizer=None, dtype="float32", max_shard_bytes=10**9)
    return str(caught.value)


def test_a_folder_that_is_there_is_left_alone(folders: dict[bool, Path], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("kept")
    (tmp_path / "model.partial").mkdir()
    for said in run_on_ranks(2, refused_export_job, folders[True], tmp_path / "model"):
        assert said == f"{tmp_path / 'model'}: is there already; remove it or choose another folder"
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["mine"]


class OddTokenizer:
    """Its files cannot be written, for a reason that is not the disk's."""

    def save_pretrained(self, folder: Path) -> None:
        raise TypeError("no vocabulary")


def odd_tokenizer_job(folder: Path, out: Path) -> str:
    engine = build(folder, Setup())
    hf_config = load_hf_config(folder, False)
    with pytest.raises(Exception) as caught:
        save_model(
            *(engine.module, out),
            hf_config=hf_config,
            tokenizer=OddTokenizer(),
            dtype="float32",
            max_shard_bytes=10**9,
        )
    return f"{caught.type.__name__}: {caught.value}"


def test_no_rank_waits_for_one_that_failed(folders: dict[bool, Path], tmp_path: Path) -> None:
    first, second = run_on_ranks(2, odd_tokenizer_job, folders[True], tmp_path / "model", timeout_s=60)
    assert first == "TypeError: no vocabulary" and second == "RuntimeError: rank 0 has failed: TypeError: no vocabulary"
    assert list(tmp_path.iterdir()) == []


def test_bfloat16_export_is_the_model_rounded(folders: dict[bool, Path], tmp_path: Path) -> None:
    args = (folders[False], Setup(), tmp_path / "model", "bfloat16", 10**9)
    result = run_on_ranks(2, train_and_export_job, *args)[0]
    assert result["dtype"] == torch.bfloat16
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    on_disk = stored(tmp_path / "model")
    for name, weight in result["weights"].items():
        assert torch.equal(on_disk[name], weight.to(torch.bfloat16)), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_several_files_and_their_index(tied: bool, folders: dict[bool, Path], tmp_path: Path) -> None:
    limit = 2_000
    out = tmp_path / "model"
    result = run_on_ranks(2, train_and_export_job, folders[tied], Setup(), out, "float32", limit)[0]
    assert torch.equal(result["logits"], result["again"])
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3 and {path.name for path in files} == set(index["weight_map"].values())
    total = 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            sizes = [file.get_tensor(name).numel() * 4 for name in file.keys()]
            assert {index["weight_map"][name] for name in file.keys()} == {path.name}
        assert sum(sizes) <= limit or len(sizes) == 1
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total == sum(w.numel() * 4 for w in result["weights"].values())
    assert index["weight_map"].keys() == result["weights"].keys()


def test_reopening_a_tied_export_is_tied(folders: dict[bool, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for tied, folder in folders.items():
        out = tmp_path / str(tied)
        run_on_ranks(2, train_and_export_job, folder, Setup(), out, "float32", 10**9)
        model = AutoModelForCausalLM.from_pretrained(out)
        same = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert same is tied is model.config.tie_word_embeddings


# ---- memory -------------------------------------------------------------------------------------------------------


def large_job(config_folder: Path, out: Path) -> dict[str, Any]:
    """Growth of this rank's memory while a random model is written, and while it is read again."""
    config = ModelConfig(model_name_or_path=str(config_folder), init="random")
    hf_config = load_hf_config(config_folder, False)

    def sharded_model() -> torch.nn.Module:
        model = build_on_meta(hf_config, config, torch.float32)
        shard_model(model, 3, make_mesh(3, "cpu"))
        materialise(model, torch.device("cpu"))
        return model

    model = sharded_model()
    init_random_weights(model, 0.02, seed=1)
    export = measure(
        lambda: save_model(model, out, hf_config=hf_config, tokenizer=None, dtype="float32", max_shard_bytes=10**9)
    )
    dist.barrier()
    other = sharded_model()
    load = measure(lambda: load_weights(other, out))
    same = all(
        torch.equal(a.to_local(), b.to_local())  # type: ignore[attr-defined]
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    return {"export": export, "load": load, "same": same}


def test_no_rank_ever_holds_a_whole_file(tmp_path: Path) -> None:
    """About 70 million float32 parameters in one file, on 4 ranks."""
    config = save_llama_config(tmp_path / "config", llama_config(8000, 1024, 1024, 10, 8, 2))
    results = run_on_fresh_ranks(4, large_job, config, tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    file_bytes, largest_bytes = file.stat().st_size, 8000 * 1024 * 4
    assert file_bytes > 280e6
    for result in results:
        assert result["same"]
        export, load = result["export"], result["load"]
        assert isinstance(export, Growth) and isinstance(load, Growth)
        # gathering holds the tensor, its parts on the way and the copy that is written
        assert export.peak < 4 * largest_bytes < file_bytes / 2
        assert export.kept < largest_bytes / 2
        assert file_bytes * 0.24 < load.kept < file_bytes * 0.27, "each rank keeps its quarter"
        assert load.peak < file_bytes


# ---- the run folder -----------------------------------------------------------------------------------------------


def test_a_run_folder_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    from heavylift.config.schema import Recipe
    from heavylift.train.loop import write_config

    recipe = Recipe.model_validate(
        {"model": {"model_name_or_path": "m"}, "data": {"dataset": "d"}, "train": {"output_dir": "o"}}
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").symlink_to("/dev/full")
    with pytest.raises(UserError, match="config.yaml: cannot be written: No space left on device; free the disk or"):
        write_config(recipe, tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file/run: cannot be written: Not a directory"):
        write_config(recipe, tmp_path / "file" / "run")
