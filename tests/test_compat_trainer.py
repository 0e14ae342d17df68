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
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks.models import save_odd_llama
from ranks.pool import run_on_fresh_ranks

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


@pytest.fixture(scope="module")
def odd_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_odd_llama(tmp_path_factory.mktemp("models") / "odd", tied=True, std=0.1)


def trainer_job(runs: list[tuple[str, ...]], as_deepspeed: bool) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    if as_deepspeed:
        from heavylift.compat import install

        install()
    else:
        del os.environ["LOCAL_RANK"]  # a process on its own
    for arguments in runs:
        if "--resume" in arguments:
            _forget_the_end(Path(arguments[arguments.index("--output_dir") + 1]))
        sys.argv = [SCRIPT.name, *arguments]
        runpy.run_path(str(SCRIPT), run_name="__main__")


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
        "own optimizer": {**AUTO, "zero_optimization": ZERO2},
        "zero2": {**AUTO, "optimizer": ADAMW, "zero_optimization": ZERO2},
        "zero3": {**AUTO, "optimizer": ADAMW, "zero_optimization": ZERO3},
    }
    paths = {name: folder / f"{name.replace(' ', '_')}.json" for name in found}
    for name, path in paths.items():
        path.write_text(json.dumps(found[name]))
    return {name: str(path) for name, path in paths.items()}


def test_the_losses_are_those_of_the_trainer_alone(odd_llama: Path, tmp_path: Path) -> None:
    """Stages 2 and 3, auto values, accumulation, saving and resuming; two ranks against one."""
    config = configs(tmp_path)
    model = ("--model", str(odd_llama))
    out = {name: tmp_path / name.replace(" ", "_") for name in (*config, "accumulated", "plain", "decayed")}
    batch = ("--batch_size", "4")
    accumulated = ("--batch_size", "2", "--accumulation", "2", "--decay", "0.1", "--output_dir")
    saving = (*model, *batch, "--save_steps", "3", "--deepspeed", config["zero3"], "--output_dir", str(out["zero3"]))
    runs = [
        (*model, *batch, "--deepspeed", config["zero2"], "--output_dir", str(out["zero2"])),
        saving,
        (*saving, "--resume"),
        (*model, *accumulated, str(out["accumulated"]), "--deepspeed", config["own optimizer"]),
    ]
    run_on_fresh_ranks(2, trainer_job, runs, True)
    alone = [
        (*model, "--batch_size", "8", "--output_dir", str(out["plain"])),
        (*model, "--batch_size", "8", "--decay", "0.1", "--output_dir", str(out["decayed"])),
    ]
    run_on_fresh_ranks(1, trainer_job, alone, False)
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


@pytest.mark.soak
def test_bfloat16(odd_llama: Path, tmp_path: Path) -> None:
    """Float32 masters here, a bfloat16 autocast over float32 weights in the Trainer alone: within 3e-2."""
    config = configs(tmp_path)
    common = ("--model", str(odd_llama), "--bf16", "--output_dir")
    out = tmp_path / "out"
    run = (*common, str(out), "--batch_size", "4", "--deepspeed", config["zero3"])
    run_on_fresh_ranks(2, trainer_job, [run], True)
    run_on_fresh_ranks(1, trainer_job, [(*common, str(tmp_path / "plain"), "--batch_size", "8")], False)
    assert read(out)["loss"] == pytest.approx(read(tmp_path / "plain")["loss"], abs=3e-2)
