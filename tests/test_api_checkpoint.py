"""Checkpoints of an engine: a resumed run goes on bit for bit, on other ranks too; weights for others; bad folders."""

from __future__ import annotations

import json
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_api.models import MAKERS
from parity_api.runs import Case, ds_config, masters, train
from parity_api.small import message_of, warnings_of
from ranks.pool import run_on_fresh_ranks, run_on_ranks
from torch import nn

import heavylift

FIRST, REST = slice(0, 2), slice(2, 4)
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-2}}
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
Tensors = dict[str, torch.Tensor]


def make_engine(case: Case, seed: int = 0, **more: Any) -> Any:
    """An engine with a scheduler; other seeds begin with other weights."""
    model = MAKERS[case.model]()
    if seed:
        torch.manual_seed(seed)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_(std=0.3)
    more = {"scheduler": SCHEDULER, **more}
    config = ds_config(case, dist.get_world_size(), **more)
    return heavylift.initialize(model=model, config=config)[0]


def states(engine: Any) -> Tensors:
    """Masters and moments, whole, by name."""
    from ranks.gather import whole

    from heavylift.api.checkpoint_states import saved_states
    from heavylift.api.checkpoint_writer import made

    trained = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
    saved = saved_states(engine.optimizer, trained)
    return {**{f"master.{n}": t for n, t in masters(engine).items()}, **{n: whole(made(t)) for n, t in saved.items()}}


def save_job(case: Case, folder: Path, more: dict[str, Any]) -> dict[str, Any]:
    """Two steps, a checkpoint, two more steps."""
    engine = make_engine(case, **more)
    train(engine, case.model, case.precision, case.accumulation, FIRST)
    saved = states(engine)
    engine.save_checkpoint(folder, client_state={"epoch": 3, "rng": torch.arange(4), "name": ("a", 1)})
    curve = train(engine, case.model, case.precision, case.accumulation, REST)
    engine.destroy()
    return {"saved": saved, "losses": curve.losses, "weights": curve.weights, "lr": engine.get_lr()}


def load_job(case: Case, folder: Path, more: dict[str, Any]) -> dict[str, Any]:
    """The same from the checkpoint, in an engine that began elsewhere and has taken a step of its own."""
    engine = make_engine(case, seed=9, **more)
    train(engine, case.model, case.precision, case.accumulation, slice(3, 4))
    path, client_state = engine.load_checkpoint(folder)
    loaded = states(engine)
    counters = (engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps)
    scale = engine.loss_scale()
    curve = train(engine, case.model, case.precision, case.accumulation, REST)
    engine.destroy()
    return {
        "path": path,
        "client_state": client_state,
        "loaded": loaded,
        "counters": counters,
        "scale": scale,
        "losses": curve.losses,
        "weights": curve.weights,
        "lr": engine.get_lr(),
    }


def same_bits(a: Tensors, b: Tensors) -> bool:
    if a.keys() != b.keys():
        return False
    return all(torch.equal(a[n].reshape(-1).view(torch.uint8), b[n].reshape(-1).view(torch.uint8)) for n in a)


CASES = {
    "offloaded": (Case("branches", 3, "cpu", "bf16", 4), {}),
    "float16": (Case("branches", 2, "none", "fp16", 1), {}),
    "bfloat16 moments": (
        Case("branches", 3, "cpu", "bf16", 1),
        {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
    ),
    "momentum": (Case("branches", 3, "none", "bf16", 1), {"optimizer": SGD}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_goes_on_bit_for_bit_and_on_other_ranks(name: str, tmp_path: Path) -> None:
    case, more = CASES[name]
    before = run_on_ranks(2, save_job, case, tmp_path, more)[0]
    assert any(key.startswith(("exp_avg.", "torch_state.momentum_buffer.")) for key in before["saved"])
    for world_size, stage in ((2, case.stage), (1, 3), (4, 1)):
        target = Case(case.model, stage, case.device, case.precision, case.accumulation)
        after = run_on_ranks(world_size, load_job, target, tmp_path, more)[0]
        assert same_bits(before["saved"], after["loaded"]), world_size
        assert after["path"] == str(tmp_path / "global_step2")
        assert after["counters"] == (2, 32, 2 * case.accumulation, 0)
        assert after["lr"] == before["lr"] and after["lr"] != [1e-2]
        if world_size == 2:
            assert after["losses"] == before["losses"]
            assert same_bits(before["weights"], after["weights"])
    client_state = after["client_state"]
    assert client_state["epoch"] == 3 and client_state["name"] == ("a", 1)
    assert torch.equal(client_state["rng"], torch.arange(4))


def odd_uses_job(folder: Path) -> dict[str, Any]:
    """Tags, module only, and what is refused."""
    case = Case("branches", 2, "cpu", "bf16", 1)
    engine = make_engine(case)
    nothing = engine.load_checkpoint(folder / "nothing")
    engine.save_checkpoint(folder, tag="first")
    engine.save_checkpoint(folder, tag="second", save_latest=False)
    messages = [
        message_of(lambda: engine.save_checkpoint(folder, client_state={"f": print})),
        message_of(lambda: engine.load_checkpoint(folder, tag="third")),
        message_of(lambda: engine.save_checkpoint(folder, tag=f"of rank {dist.get_rank()}")),
    ]
    other = make_engine(case, seed=5)
    train(other, "branches", "bf16", 1, FIRST)
    before = states(other)
    other.load_checkpoint(folder, load_module_only=True)
    after, weights = states(other), masters(engine)
    steps = other.global_steps
    alien = make_engine(Case("llama", 2, "cpu", "bf16", 1))
    messages.append(message_of(lambda: alien.load_checkpoint(folder)))
    told = warnings_of(lambda: alien.load_checkpoint(folder, load_module_strict=False, load_optimizer_states=False))
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "first" / "training.json").write_text("{")
    dist.barrier()
    messages.append(message_of(lambda: engine.load_checkpoint(folder)))
    for each in (engine, other, alien):
        each.destroy()
    return {
        "nothing": nothing,
        "messages": messages,
        "told": told,
        "weights": same_bits({n: after[f"master.{n}"] for n in weights}, weights),
        "moments": all(torch.equal(before[n], after[n]) for n in before if n.startswith("exp_avg")),
        "steps": steps,
    }


def test_tags_weights_alone_and_what_is_refused(tmp_path: Path) -> None:
    result = run_on_ranks(2, odd_uses_job, tmp_path)[0]
    assert result["nothing"] == (None, {})
    assert (tmp_path / "latest").read_text() == "first"
    assert (tmp_path / "second" / "extras.pt").is_file()
    assert result["weights"] and result["moments"] and result["steps"] == 2
    assert len(result["told"]) == 1 and result["told"][0].startswith("load_checkpoint: 0 of this model's ")
    client, tag, ranks, other_model, damaged = result["messages"]
    assert "client_state['f'] is of type builtin_function_or_method, which cannot be loaded" in client
    assert f"{tmp_path / 'third'} is no checkpoint; these are there: first, second" in tag
    assert "tag should be the same on all ranks, got ['of rank 0', 'of rank 1']" in ranks
    assert "holds another model: it lacks" in other_model and "load_module_strict=False" in other_model
    assert "training.json is damaged; load another tag" in damaged
    assert all("\n" not in message for message in result["messages"])
    assert not list(tmp_path.glob(".*saving"))


def test_a_checkpoint_of_deepspeed_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / "mp_rank_00_model_states.pt").touch()
    assert "written by DeepSpeed" in run_on_ranks(1, load_message_job, tmp_path, "tag")[0]


def load_message_job(folder: Path, tag: str) -> str:
    engine = make_engine(Case())
    message = message_of(lambda: engine.load_checkpoint(folder, tag=tag))
    engine.destroy()
    return message


def weights_job(folder: Path) -> dict[str, Any]:
    """Weights in files, and as dictionaries, of a model with a tied weight."""
    case = Case("llama", 3, "none", "bf16", 1)
    engine = make_engine(case)
    refused = engine.save_16bit_model(folder)
    engine.destroy()
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    engine = make_engine(case, zero_optimization=zero)
    train(engine, case.model, case.precision, 1, FIRST)
    saved = [engine.save_16bit_model(folder), engine.save_16bit_model(folder, "model.safetensors")]
    sharded = engine.module_state_dict()
    consolidated = engine._zero3_consolidated_16bit_state_dict()
    truth = masters(engine)
    engine.destroy()
    whole = make_engine(Case("llama", 2, "none", "bf16", 1))
    whole.load_module_state_dict(torch.load(folder / "pytorch_model.bin", weights_only=True))
    reloaded = {n: t.clone() for n, t in whole.module_state_dict().items()}
    whole.destroy()
    return {
        "refused": refused,
        "saved": saved,
        "sharded": {type(t).__name__ for t in sharded.values()},
        "consolidated": consolidated,
        "truth": truth,
        "reloaded": reloaded,
    }


def test_weights_are_written_whole_for_others(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    first, second = run_on_ranks(2, weights_job, tmp_path)
    assert first["refused"] is False and first["saved"] == [True, True]
    assert first["sharded"] == {"DTensor"}
    assert second["consolidated"] is None
    truth = {name: tensor.bfloat16() for name, tensor in first["truth"].items()}
    written = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert written.keys() == truth.keys() | {"lm_head.weight"}
    assert torch.equal(written["lm_head.weight"], truth["model.embed_tokens.weight"])
    assert same_bits(load_file(tmp_path / "model.safetensors"), truth)
    for state_dict in (written, first["consolidated"], first["reloaded"], second["reloaded"]):
        assert same_bits({name: state_dict[name] for name in truth}, truth)


def test_the_files_are_what_the_module_says(tmp_path: Path) -> None:
    run_on_ranks(1, save_job, Case(), tmp_path, {})
    training = json.loads((tmp_path / "global_step2" / "training.json").read_text())
    assert training["global_steps"] == 2 and training["format"] == 1
    assert training["steps"]["spare.weight"] == 0 and training["steps"]["inside.weight"] == 2
    extras = torch.load(tmp_path / "global_step2" / "extras.pt", weights_only=True)
    assert extras["lr_scheduler"] == {"last_batch_iteration": 1}


def lonely_job(folder: Path) -> str:
    """Rank 0 alone saves."""
    from heavylift.api import checkpoint

    checkpoint.ARRIVAL_TIMEOUT = timedelta(seconds=2)
    engine = make_engine(Case())
    message = message_of(lambda: engine.save_checkpoint(folder)) if dist.get_rank() == 0 else ""
    engine.destroy()
    return message


@pytest.mark.soak
def test_a_save_on_one_rank_alone_does_not_wait_for_ever(tmp_path: Path) -> None:
    message, _ = run_on_fresh_ranks(2, lonely_job, tmp_path)
    assert message.startswith("save_checkpoint: not every rank has called it within 2 s") and "\n" not in message


def gone_job(folder: Path) -> str:
    """Rank 1 leaves, rank 0 saves."""
    engine = make_engine(Case())
    dist.barrier()
    if dist.get_rank() == 1:
        threading.Timer(1.0, os._exit, (0,)).start()  # once the job is answered
        return ""
    return message_of(lambda: engine.save_checkpoint(folder))


def test_a_rank_that_has_left_is_not_called_late(tmp_path: Path) -> None:
    message, _ = run_on_fresh_ranks(2, gone_job, tmp_path, timeout_s=60)
    assert message.startswith("save_checkpoint: a rank has left, ") and "\n" not in message


def names_job(folder: Path) -> dict[str, str]:
    """Tags of any type; what is no tag, no folder, no client state."""
    from argparse import Namespace

    import numpy as np

    engine = make_engine(Case("branches", 2, "cpu", "bf16"))
    (folder / ".step3.saving").mkdir()
    engine.save_checkpoint(folder, tag=7)
    engine.save_checkpoint(folder, tag="best/of 3", save_latest=False)
    loaded = [engine.load_checkpoint(folder, tag=tag)[0] for tag in (7, "best/of 3", None)]
    assert loaded == [str(folder / "7"), str(folder / "best/of 3"), str(folder / "7")]
    engine.save_16bit_model(folder, "sub/weights.bin")
    found = {
        f"{call} {tag!r}": message_of(lambda call=call, tag=tag: getattr(engine, call)(folder, tag=tag))
        for call in ("save_checkpoint", "load_checkpoint")
        for tag in ("../evil", "", ".", "/evil", " x", "latest")
    }
    found |= {
        f"{call} in 5": message_of(lambda call=call: getattr(engine, call)(5))
        for call in ("save_checkpoint", "load_checkpoint", "save_16bit_model")
    }
    states = {
        "list": [1],
        "args": {"epoch": 1, "args": Namespace(lr=1.0)},
        "numpy": {"best": [{"loss": np.float64(2.0)}]},
        "module": {"m": nn.Linear(2, 2)},
        "function": {"f": print},
    }
    found |= {k: message_of(lambda v=v: engine.save_checkpoint(folder, client_state=v)) for k, v in states.items()}
    (folder / "latest").write_bytes(b"\xff\xfe")
    found["latest"] = message_of(lambda: engine.load_checkpoint(folder))
    engine.destroy()
    return found


def test_names_and_client_states_that_cannot_be(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    found = run_on_ranks(1, names_job, folder)[0]
    assert not (tmp_path / "evil").exists() and not list(folder.glob("*.json")) and not list(folder.glob(".*saving"))
    assert (folder / "sub" / "weights.bin").is_file()
    for what, message in found.items():
        assert "\n" not in message and "\x1b" not in message and len(message) < 250, message
        if what.startswith(("save_checkpoint '", "load_checkpoint '")):
            assert message.startswith(what.replace(" ", ": tag=", 1)), message
        if what.endswith(" in 5"):
            assert message == f"{what.removesuffix(' in 5')}: expected the path of a folder, got 5"
    assert found["list"] == "save_checkpoint: client_state= should be a dictionary, got [1]"
    assert (
        "client_state['args'] is of type argparse.Namespace" in found["args"] and "save vars() of it" in found["args"]
    )
    assert "client_state['best'][0]['loss'] is of type numpy.float64" in found["numpy"] and ".item()" in found["numpy"]
    assert "client_state['m'] is of type torch.nn" in found["module"] and "state_dict()" in found["module"]
    assert "client_state['f'] is of type builtin_function_or_method" in found["function"]
    assert f"{folder / 'latest'} is damaged" in found["latest"]


def damage_job(folder: Path, files: dict[str, str]) -> dict[str, str]:
    """One checkpoint, damaged in one way after the other."""
    engine = make_engine(Case("branches", 2, "cpu", "bf16"))
    engine.save_checkpoint(folder, tag="good")
    found = {}
    for how, name in files.items():
        file = folder / "good" / name
        intact = file.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            if how == "missing":
                file.unlink()
            else:
                file.write_bytes(flipped(intact) if how.startswith("flipped") else intact[: len(intact) // 2])
        dist.barrier()
        found[how] = message_of(lambda: engine.load_checkpoint(folder))
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(intact)
    dist.barrier()
    assert engine.load_checkpoint(folder)[0] == str(folder / "good")
    engine.destroy()
    return found


def flipped(data: bytes) -> bytes:
    """Every byte of the middle third inverted."""
    low, high = len(data) // 3, 2 * len(data) // 3
    return data[:low] + bytes(255 - byte for byte in data[low:high]) + data[high:]


def test_a_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from heavylift.api import zero_to_fp32

    files = {"cut": "__1_0.distcp", "flipped": "__0_0.distcp", "missing": "__0_0.distcp"}
    files |= {"flipped extras": "extras.pt", "cut extras": "extras.pt", "cut metadata": ".metadata"}
    first, second = run_on_ranks(2, damage_job, tmp_path, files)
    for how, name in files.items():
        for message in (first[how], second[how]):
            assert message.startswith(f"{tmp_path / 'good' / name} is "), message
            assert message.endswith("; load another tag") and "\n" not in message, message
    file = tmp_path / "good" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-40])
    capsys.readouterr()
    assert zero_to_fp32.main([str(tmp_path), str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"error: {file} is damaged: it is cut off at ") and told.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def killed_job(folder: Path) -> list[str]:
    """Saved again and again under one tag; what is loaded where a save was killed between its two renames."""
    engine = make_engine(Case("branches", 2, "cpu", "bf16"))
    found = []
    for suffix in ("replaced", "saving"):
        engine.save_checkpoint(folder, tag="last")
        os.rename(folder / "last", folder / f".last.{suffix}")
        found.append(str(engine.load_checkpoint(folder)[0]))
    engine.save_checkpoint(folder, tag="other", save_latest=False)
    found.append(str(engine.load_checkpoint(folder)[0]))
    engine.destroy()
    return found


def test_a_killed_save_leaves_something_to_load(tmp_path: Path) -> None:
    found = run_on_ranks(1, killed_job, tmp_path)[0]
    assert found == [str(tmp_path / name) for name in (".last.replaced", ".last.saving", "last")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "latest", "other"]


class Tempered(nn.Module):
    """A learnt temperature without a dimension, used twice, and another that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.inner = nn.Module()
        self.inner.temperature = self.temperature
        self.offset = nn.Parameter(torch.tensor(0.1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) / self.temperature + self.offset * self.inner.temperature).square().mean()


def scalars_job(folder: Path) -> dict[str, Any]:
    torch.manual_seed(8)
    model = Tempered()
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    config = ds_config(Case("", 3, "none"), dist.get_world_size(), zero_optimization=zero)
    engine, *_ = heavylift.initialize(model=model, config=config)
    for _ in range(3):
        engine.backward(engine(torch.linspace(-1, 1, 40).view(8, 5) + dist.get_rank()))
        engine.step()
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder)
    engine.destroy()
    whole = heavylift.initialize(model=Tempered(), config=ds_config(Case("", 2, "none"), dist.get_world_size()))[0]
    whole.load_module_state_dict(torch.load(folder / "pytorch_model.bin", weights_only=True))
    return {name: t.clone() for name, t in whole.module_state_dict().items()}


def test_scalars_are_trained_and_written_as_scalars(tmp_path: Path) -> None:
    from heavylift.api.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    loaded = run_on_ranks(2, scalars_job, tmp_path)[0]
    torch.manual_seed(8)
    model = Tempered()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)
    for _ in range(3):
        for rank in range(2):
            (model(torch.linspace(-1, 1, 40).view(8, 5) + rank) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
    written = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    converted = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    expected = model.state_dict()
    assert written["temperature"].ndim == written["offset"].ndim == 0
    assert written.keys() == loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        for found in (written[name], loaded[name], converted.get(name, written[name])):
            assert found.shape == tensor.shape and torch.allclose(found, tensor, atol=1e-6), name
    assert {"temperature", "offset", "layer.weight"} <= converted.keys()
    assert expected["temperature"] != 0.7
