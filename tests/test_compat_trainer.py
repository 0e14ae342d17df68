"""Hugging Face's Trainer with `deepspeed=ds_config.json`, through Accelerate, on heavylift: the losses of the Trainer
alone. The script is unmodified; tolerances are those of sums in another order.

Without an optimizer in the configuration the Trainer's own AdamW is taken, with its two parameter groups; with one, all
parameters decay, which is the Trainer's doing, so those runs have no decay.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks.models import save_odd_llama
from ranks.pool import _Pool

# not `importorskip`: the ranks import this module, and accelerate must come after `install()`
pytestmark = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")

SCRIPT = Path(__file__).parent / "ds_scripts" / "hf_trainer.py"
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}
ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
ADAMW_3E4 = {"type": "AdamW", "params": {"lr": 3e-4}}
ZERO2 = {"stage": 2, "reduce_bucket_size": "auto"}
ZERO3 = {
    "stage": 3,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_gather_16bit_weights_on_model_save": True,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
}
Result = dict[str, Any]
Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def odd_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_odd_llama(tmp_path_factory.mktemp("models") / "odd", tied=True, std=0.1)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Run]:
    """Two processes for all of these tests, in which nothing of Hugging Face has been imported before `install()`."""
    yield from _ranks(2)


@pytest.fixture(scope="module")
def alone() -> Iterator[Run]:
    """One process, for what Hugging Face does without heavylift."""
    yield from _ranks(1)


def _ranks(world_size: int) -> Iterator[Run]:
    pool = _Pool(world_size)
    yield lambda job, *args: pool.run(job, args, 240)
    pool.close()


def loop_job(runs: list[tuple[str, ...]], as_deepspeed: bool) -> None:
    """The script with Accelerate's own loop, several times."""
    _run(SCRIPT.with_name("accelerate_loop.py"), runs, as_deepspeed)


def trainer_job(runs: list[tuple[str, ...]], as_deepspeed: bool) -> None:
    _run(SCRIPT, runs, as_deepspeed)


def _run(script: Path, runs: list[tuple[str, ...]], as_deepspeed: bool) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    if as_deepspeed:
        from heavylift.compat import install

        install()
    else:
        os.environ.pop("LOCAL_RANK", None)  # a process on its own
    for arguments in runs:
        if "--resume" in arguments:
            _forget_the_end(Path(arguments[arguments.index("--output_dir") + 1]))
        sys.argv = [script.name, *arguments]
        runpy.run_path(str(script), run_name="__main__")


def _forget_the_end(folder: Path) -> None:
    """As if the run had been killed after its first checkpoint; what it did is kept in `whole.json`."""
    if dist.get_rank() == 0:
        (folder / "result.json").rename(folder / "whole.json")
        shutil.rmtree(folder / "checkpoint-6")
    dist.barrier()


def read(folder: Path, name: str = "result.json") -> Result:
    return json.loads((folder / name).read_text())


def same_training(ours: Result, plain: Result, engine_has_scheduler: bool) -> bool:
    """Losses, norms and the loss of the evaluation; and the rates, but for when they are looked at."""
    assert ours["loss"] == pytest.approx(plain["loss"], abs=5e-6)
    assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
    assert ours["eval_loss"] == pytest.approx(plain["eval_loss"], abs=5e-6)
    # an engine steps its scheduler with the optimizer, before the Trainer logs: that is the rate of the coming step
    seen, used = ours["learning_rate"], plain["learning_rate"]
    assert seen[:-1] == pytest.approx(used[1:]) if engine_has_scheduler else seen == pytest.approx(used)
    return True


def configs(folder: Path) -> dict[str, str]:
    """Name -> path."""
    found = {
        "own optimizer": {**AUTO, "zero_optimization": {**ZERO2, "offload_optimizer": {"device": "cpu"}}},
        "zero2": {**AUTO, "optimizer": ADAMW, "zero_optimization": ZERO2},
        "zero3": {**AUTO, "optimizer": ADAMW, "zero_optimization": ZERO3},
    }
    paths = {name: folder / f"{name.replace(' ', '_')}.json" for name in found}
    for name, path in paths.items():
        path.write_text(json.dumps(found[name]))
    return {name: str(path) for name, path in paths.items()}


def test_the_losses_are_those_of_the_trainer_alone(odd_llama: Path, tmp_path: Path, two_ranks: Run, alone: Run) -> None:
    """Stages 2 and 3, auto values, accumulation, label smoothing, saving and resuming; two ranks against one."""
    config = configs(tmp_path)
    model = ("--model", str(odd_llama))
    out = {name: tmp_path / name.replace(" ", "_") for name in (*config, "accumulated", "plain", "decayed")}
    batch = ("--batch_size", "4")
    decay = ("--decay", "0.1", "--smoothing", "0.1", "--output_dir")
    accumulated = ("--batch_size", "2", "--accumulation", "2", *decay)
    saving = (*model, *batch, "--save_steps", "3", "--deepspeed", config["zero3"], "--output_dir", str(out["zero3"]))
    runs = [
        (*model, *batch, "--deepspeed", config["zero2"], "--output_dir", str(out["zero2"])),
        saving,
        (*saving, "--resume"),
        (*model, *accumulated, str(out["accumulated"]), "--deepspeed", config["own optimizer"]),
    ]
    two_ranks(trainer_job, runs, True)
    plain_runs = [
        (*model, "--batch_size", "8", "--output_dir", str(out["plain"])),
        (*model, "--batch_size", "8", *decay, str(out["decayed"])),
    ]
    alone(trainer_job, plain_runs, False)
    plain, decayed, whole = read(out["plain"]), read(out["decayed"]), read(out["zero3"], "whole.json")
    assert plain["loss"] != decayed["loss"]
    assert same_training(read(out["zero2"]), plain, True)
    assert same_training(whole, plain, True)
    assert same_training(read(out["accumulated"]), decayed, False)
    _check_saved(out["zero3"], odd_llama)
    resumed = read(out["zero3"])
    assert resumed["loss"] == whole["loss"]  # those of before the checkpoint are in its log
    assert resumed["eval_loss"] == whole["eval_loss"]


def _check_saved(folder: Path, model: Path) -> None:
    """`save_model` writes a folder that loads, with weights that have been trained."""
    import torch
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(folder / "final").state_dict()
    assert before.keys() == after.keys()
    assert all(before[name].shape == after[name].shape for name in before)
    assert not any(torch.equal(before[name], after[name]) for name in before)


def models_job(folder: Path) -> list[str]:
    """Models that transformers makes under stage 3: loaded, made from a configuration, with more words."""
    from heavylift.compat import install

    install()
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    plain = AutoModelForCausalLM.from_pretrained(folder)
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    stage3 = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    wrong = []
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    if any(p.shape != (0,) for p in loaded.parameters()):
        wrong.append("a loaded parameter is not split")
    values = whole(loaded)
    wrong += [f"loaded {n}" for n in expected if not torch.equal(values[n], expected[n])]
    loaded.resize_token_embeddings(105, mean_resizing=False)
    values = whole(loaded)
    name = "model.embed_tokens.weight"
    if values[name].shape != (105, 9) or not torch.equal(values[name][:101], expected[name]):
        wrong.append(f"resized: {tuple(values[name].shape)}")
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    values = whole(made)
    wrong += [f"made {n}" for n in expected if values[n].shape != expected[n].shape]
    if not 0.05 < float(values[name].std()) < 0.2 or not bool((values["model.norm.weight"] == 1).all()):
        wrong.append("made with other distributions than the configuration's")
    engine, *_ = deepspeed.initialize(model=loaded, config={**stage3.config, "optimizer": ADAMW_3E4})
    ids = torch.arange(100, 105)[None]
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    with deepspeed.zero.GatheredParameters(engine.module.get_input_embeddings().weight):
        if engine.module.get_input_embeddings().weight.shape != (105, 9):
            wrong.append("resized, then trained")
    return wrong


def test_models_of_transformers_under_stage_3(odd_llama: Path, two_ranks: Run) -> None:
    assert two_ranks(models_job, odd_llama) == [[], []]


def test_a_loop_of_accelerate(tmp_path: Path, two_ranks: Run, alone: Run) -> None:
    """Stages 2 and 3 against Accelerate alone: losses, norms, weights; `load_state` goes back to the bit."""
    runs = [("--stage", s, "--output", f"{tmp_path}/{s}.json", "--state_dir", f"{tmp_path}/s{s}") for s in ("2", "3")]
    two_ranks(loop_job, runs, True)
    alone(loop_job, [("--plain", "--output", f"{tmp_path}/plain.json")], False)
    plain, *sharded = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "2", "3"))
    for ours in sharded:
        assert ours["losses"] == pytest.approx(plain["losses"], abs=2e-6)
        assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-5)
        assert ours["weights"] == pytest.approx(plain["weights"], abs=1e-5)
        assert ours["again"] == ours["losses"][4:]


@pytest.mark.soak
def test_bfloat16(odd_llama: Path, tmp_path: Path, two_ranks: Run, alone: Run) -> None:
    """Float32 masters here, a bfloat16 autocast over float32 weights in the Trainer alone: within 3e-2."""
    config = configs(tmp_path)
    common = ("--model", str(odd_llama), "--bf16", "--output_dir")
    out = tmp_path / "out"
    run = (*common, str(out), "--batch_size", "4", "--deepspeed", config["zero3"])
    two_ranks(trainer_job, [run], True)
    alone(trainer_job, [(*common, str(tmp_path / "plain"), "--batch_size", "8")], False)
    assert read(out)["loss"] == pytest.approx(read(tmp_path / "plain")["loss"], abs=3e-2)
