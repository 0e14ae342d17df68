"""The engine's calls: boundaries, no_sync, batch sizes, dataloader, masters, buffers, what it tells and refuses."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import command_env
from parity_api.models import make_branches, make_llama, micro_batches
from parity_api.plain import plain_curve
from parity_api.runs import Case, ds_config, masters, train, whole
from parity_api.small import message_of, rows
from ranks.pool import run_on_ranks
from torch import nn

import heavylift
from heavylift.offload.access import find_states

# ---- what initialize() makes of a model ---------------------------------------------------------------------------


def masters_job() -> dict[str, Any]:
    """A float32 model in bfloat16: masters, parameters, buffers, before and after a step of rate 0."""
    model = make_branches()
    if dist.get_rank() == 1:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(7.0)
    held = model.left.weight
    config = ds_config(Case("branches", 3, "cpu", "bf16"), 2)
    config["optimizer"]["params"] = {"lr": 0.0}
    engine, optimizer, _, _ = heavylift.initialize(model=model, config=config)
    before = masters(engine)
    engine.backward(engine(*rows(8, torch.bfloat16))["loss"])
    engine.step()
    result = {
        "before": before,
        "after": masters(engine),
        "params": {n: whole(p) for n, p in engine.module.named_parameters()},
        "buffer": engine.frequencies,
        "held": held.numel(),
        "local": find_states(optimizer, engine.module.left.weight).segment.numel,
    }
    engine.destroy()
    return result


def test_masters_are_the_weights_from_before_rounding_and_buffers_stay() -> None:
    original = make_branches()
    for rank, result in enumerate(run_on_ranks(2, masters_job)):
        for name, param in original.named_parameters():
            assert torch.equal(result["params"][name], param.bfloat16()), name
            if param.requires_grad:
                assert torch.equal(result["before"][name], param), name
                assert torch.equal(result["after"][name], param), name
        assert not torch.equal(original.left.weight.bfloat16().float(), original.left.weight)
        assert torch.equal(result["buffer"], original.frequencies)
        assert result["held"] == 0
        assert result["local"] == (4 * 9 if rank == 0 else 3 * 9)


def recompute_job() -> dict[str, Any]:
    """A Hugging Face model whose layers recompute by the configuration; forwards of the first layer are counted."""
    results: dict[str, Any] = {}
    for name, block in {
        "kept": {},
        "recomputed": {"number_checkpoints": 1},
        "on the host": {"cpu_checkpointing": True},
    }.items():
        model = make_llama()
        calls: list[int] = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        config = ds_config(Case("llama", 3, "cpu", "fp32", 4), dist.get_world_size(), activation_checkpointing=block)
        engine, *_ = heavylift.initialize(model=model, config=config)
        curve = train(engine, "llama", "fp32", 4)
        results[name] = (len(calls), curve.losses, curve.weights)
        engine.destroy()
    return results


def test_layers_recompute_as_the_configuration_asks() -> None:
    results = run_on_ranks(2, recompute_job)[0]
    calls, losses, weights = results["kept"]
    assert losses == pytest.approx(plain_curve("llama", "fp32", 2, 4).losses, rel=2e-6)
    for name in ("recomputed", "on the host"):
        assert results[name][0] == 2 * calls and results[name][1] == losses
        assert all(torch.equal(results[name][2][n], weights[n]) for n in weights)


# ---- stepping -----------------------------------------------------------------------------------------------------


def boundaries_job(stage: int) -> dict[str, Any]:
    """Accumulation by the engine, by hand, and in no_sync: three ways to the same weights."""
    data = micro_batches("branches", 8, torch.float32)

    def batches(step: int) -> list[dict[str, Any]]:
        return data[step][dist.get_rank() :: 2]

    case = Case("branches", stage, "none", "fp32", 4)
    counted, *_ = heavylift.initialize(model=make_branches(), config=ds_config(case, 2))
    applied = []
    for step in range(2):
        for batch in batches(step):
            boundary = counted.is_gradient_accumulation_boundary()
            returned = counted.backward(counted(**batch)["loss"])
            counted.step()
            applied.append((boundary, counted.was_step_applied(), counted.global_steps))
    ratio = counted(**batches(0)[0])["loss"].item() / counted.backward(counted(**batches(0)[0])["loss"]).item()
    results = {"counted": masters(counted)}

    by_hand, *_ = heavylift.initialize(model=make_branches(), config=ds_config(case, 2))
    for step in range(2):
        for index, batch in enumerate(batches(step)):
            by_hand.set_gradient_accumulation_boundary(index == 3)
            by_hand.scale(by_hand(**batch)["loss"]).backward()
            by_hand.step()
    results["by hand"] = masters(by_hand)

    config = ds_config(case, 2)
    config |= {"gradient_accumulation_steps": 1, "train_batch_size": 4}
    unmanaged, *_ = heavylift.initialize(
        model=make_branches(), config={**config, "managed_gradient_accumulation": False}
    )
    for step in range(2):
        for batch in batches(step):
            unmanaged.backward(unmanaged(**batch)["loss"] / 4)
        unmanaged.step()
    results["unmanaged"] = masters(unmanaged)
    if stage < 2:
        with unmanaged.no_sync():
            message = message_of(unmanaged.step)
        held, *_ = heavylift.initialize(
            model=make_branches(), config={**config, "managed_gradient_accumulation": False}
        )
        for step in range(2):
            *first, last = batches(step)
            with held.no_sync():
                for batch in first:
                    held.backward(held(**batch)["loss"] / 4)
            held.backward(held(**last)["loss"] / 4)
            held.step()
        results["held back"] = masters(held)
        held.destroy()
    else:
        message = message_of(lambda: unmanaged.no_sync().__enter__())
    for engine in (counted, by_hand, unmanaged):
        engine.destroy()
    return {"weights": results, "applied": applied, "ratio": ratio, "message": message, "is_tensor": returned.ndim == 0}


@pytest.mark.parametrize("stage", [1, 3])
def test_boundaries_counted_by_hand_and_held_back(stage: int) -> None:
    result = run_on_ranks(2, boundaries_job, stage)[0]
    assert result["applied"] == [(i % 4 == 3, i % 4 == 3, (i + 1) // 4) for i in range(8)]
    assert result["ratio"] == pytest.approx(4.0) and result["is_tensor"]
    counted = result["weights"].pop("counted")
    assert len(result["weights"]) == (3 if stage == 1 else 2)
    for name, weights in result["weights"].items():
        assert all(torch.allclose(weights[n], counted[n], atol=1e-7) for n in counted), name
    assert result["message"].startswith("step: called inside" if stage == 1 else "no_sync: stage 3 shards gradients")


def evaluation_job(case: Case) -> dict[str, Any]:
    """Evaluation between backward and step must neither see nor leave stale weights."""
    results = {}
    for looks in (False, True):
        engine, *_ = heavylift.initialize(model=make_branches(), config=ds_config(case, 2))
        seen = []
        for _ in range(3 * case.accumulation):
            engine.backward(engine(*rows(8))["loss"])
            if looks:
                engine.eval()
                with torch.no_grad():
                    engine(*rows(8))
                engine.module(*rows(8))  # gathers too, and no backward follows
                engine.train()
            engine.step()
            if looks:
                with torch.no_grad():
                    seen.append(engine(*rows(8))["loss"].item())
        results[looks] = (masters(engine), seen)
        engine.destroy()
    plain = make_branches()
    plain.load_state_dict({**plain.state_dict(), **results[True][0]})
    with torch.no_grad():
        last = plain(*rows(8))["loss"].item()
    return {"without": results[False][0], "with": results[True][0], "seen": results[True][1], "last": last}


@pytest.mark.parametrize("case", [Case("", 2, "cpu"), Case("", 0, "none", "fp32", 2), Case("", 1, "cpu", "fp32", 2)])
def test_evaluation_in_between_changes_nothing(case: Case) -> None:
    result = run_on_ranks(2, evaluation_job, case)[0]
    assert all(torch.equal(result["without"][n], result["with"][n]) for n in result["with"])
    assert result["seen"][-1] == pytest.approx(result["last"], rel=1e-6)
    # with accumulation the first look is before the first step
    assert len(set(result["seen"])) == 3 + (case.accumulation > 1)


def batch_sizes_job() -> dict[str, Any]:
    """Batch sizes that change, and calls that come wrong."""
    engine, *_ = heavylift.initialize(model=make_branches(), config=ds_config(Case("branches", 3, "cpu", "fp32", 2), 2))
    sizes = [engine.get_batch_info()]
    engine.set_train_batch_size(32)
    sizes.append(engine.get_batch_info())
    engine.set_train_micro_batch_size(2)
    sizes.append(engine.get_batch_info())
    messages = [message_of(lambda: engine.set_train_batch_size(30)), message_of(lambda: engine.backward(torch.ones(1)))]
    messages.append(message_of(lambda: engine.backward(engine(*rows(2))["loss"].expand(2))))
    engine.set_gradient_accumulation_boundary(True)
    messages.append(message_of(engine.step))
    single, *_ = heavylift.initialize(model=make_branches(), config=ds_config(Case("branches", 3, "cpu"), 2))
    messages.append(message_of(lambda: single.set_train_batch_size(64)))
    messages.append(message_of(lambda: single.set_train_batch_size("64")))  # type: ignore[arg-type]
    messages.append(message_of(lambda: single.deepspeed_io(Numbers(), collate_fn=5)))
    with pytest.raises(AttributeError, match="neither the engine nor its module"):
        engine.nonsense  # noqa: B018
    getters = (
        engine.zero_optimization_stage(),
        engine.gradient_clipping(),
        engine.fp16_enabled(),
        engine.get_lr(),
        engine.get_mom(),
        engine.get_global_grad_norm(),
    )
    for each in (engine, single):
        each.destroy()
        each.destroy()
    for action in (
        lambda: single(*rows(2)),
        lambda: single.save_checkpoint("never"),
        lambda: single.load_checkpoint("no"),
    ):
        messages.append(message_of(action))
    return {"sizes": sizes, "messages": messages, "getters": getters}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dist_backend": "foo"}, "dist_backend= should be nccl or gloo, or leave it out, got 'foo'"),
        ({"timeout": 5}, "timeout= should be a datetime.timedelta, got 5"),
        ({"rank": 2, "world_size": 2}, "rank= should be below world_size=2, got 2"),
    ],
)
def test_init_distributed_checks_what_it_is_given(given: dict[str, Any], said: str) -> None:
    assert message_of(lambda: heavylift.init_distributed(**given)) == f"init_distributed: {said}"
    assert not dist.is_initialized()


def backward_twice_job() -> tuple[str, str]:
    """The same loss again, and the engine after that."""
    engine, *_ = heavylift.initialize(
        model=make_branches(), config=ds_config(Case("branches", 3, "none", "fp32", 2), 2)
    )
    loss = engine(*rows(4))["loss"]
    engine.backward(loss)
    messages = message_of(lambda: engine.backward(loss)), message_of(lambda: engine(*rows(4)))
    engine.destroy()
    return messages


def test_a_second_backward_through_the_same_forward_is_named() -> None:
    twice, after = run_on_ranks(2, backward_twice_job, timeout_s=60)[0]
    assert twice.startswith("backward: a second backward through the same forward") and "\n" not in twice
    assert "it cannot go on after an exception in backward" in after


def test_batch_sizes_and_calls_that_come_wrong() -> None:
    result = run_on_ranks(2, batch_sizes_job)[0]
    assert result["sizes"] == [(16, 4, 2), (32, 4, 4), (16, 2, 4)]
    assert result["getters"] == (3, 0.5, False, [1e-2], [(0.9, 0.999)], None)
    expected = [
        "30 is not a multiple of micro-batch x ranks = 2 x 2 = 4",
        "the loss depends on no trained parameter",
        "the loss should be one number, got shape (2,)",
        "no backward since the last step",
        "this engine was made for one; start with gradient_accumulation_steps above 1",
        "set_train_batch_size: expected a whole number from 1 on, got '64'",
        "collate_fn= should be a function of a list of rows, got 5",
        *["engine: destroy() has ended it; make a new one with initialize()"] * 3,
    ]
    for message, part in zip(result["messages"], expected, strict=True):
        assert part in message and "\n" not in message


# ---- data, arguments, single processes ----------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


def loader_job() -> dict[str, Any]:
    engine, _, loader, _ = heavylift.initialize(
        model=make_branches(), config=ds_config(Case(accumulation=2), 2), training_data=Numbers()
    )
    assert loader is not None and loader is engine.training_dataloader
    passes = [torch.cat(list(loader)).tolist() for _ in range(2)]
    by_hand = engine.deepspeed_io(Numbers(), batch_size=3, route="eval", collate_fn=tuple)
    result = {"passes": passes, "length": len(loader), "first": next(by_hand), "second": next(by_hand)}
    engine.destroy()
    return result


def test_every_rank_gets_its_own_rows_shuffled_anew_each_pass() -> None:
    first, second = run_on_ranks(2, loader_job)
    assert first["length"] == 3
    for one, other in zip(first["passes"], second["passes"], strict=True):
        assert sorted(one + other) == list(range(20))
    assert first["passes"][0] != first["passes"][1]
    assert (first["first"], first["second"]) == ((0, 2, 4), (6, 8, 10))


def test_the_arguments_of_a_script() -> None:
    parser = heavylift.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert args.deepspeed and args.deepspeed_config == "ds.json"
    assert not parser.parse_args([]).deepspeed and parser.parse_args([]).deepspeed_config is None


SCRIPT = """
import argparse, sys
import heavylift
assert "torch" not in sys.modules, "importing heavylift is quick"
import heavylift as deepspeed, torch
from torch import nn
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
args = parser.parse_args()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
data = [(torch.randn(4), torch.randn(1)) for _ in range(16)]
engine, optimizer, loader, scheduler = deepspeed.initialize(args=args, model=model, training_data=data)
losses = []
for _ in range(8):
    for x, y in loader:
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
print(engine.world_size, engine.global_steps, sum(losses[:8]) > sum(losses[-8:]), scheduler.get_last_lr())
"""


def test_a_script_runs_as_a_single_process_without_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "dump_state": True,
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "script.py", "--deepspeed", "--deepspeed_config", "ds.json"],
        cwd=tmp_path,
        env={k: v for k, v in command_env().items() if k not in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    *dumped, last = done.stdout.strip().splitlines()
    assert last == "1 32 True [0.01]"
    assert any(line.split() == ["stage", "2"] for line in dumped)


def evaluated_first_job() -> str:
    engine, *_ = heavylift.initialize(model=make_branches(), config={"train_micro_batch_size_per_gpu": 1})
    engine.destroy()
    return message_of(lambda: engine(*rows(2)))


def test_the_trainers_engine_of_an_evaluation_before_training_says_what_to_do() -> None:
    assert run_on_ranks(1, evaluated_first_job)[0].endswith(
        "made by evaluate() before train(), set eval_on_start=True instead"
    )


class Twin(nn.Module):
    """Tied weights in a custom module, and outputs that are no dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 5, bias=False)
        self.other = nn.Linear(5, 5, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.other(torch.tanh(self.one(x))).square().mean(), 3


def tied_job() -> tuple[bool, torch.Tensor, tuple[str, ...]]:
    torch.manual_seed(2)
    engine, *_ = heavylift.initialize(model=Twin(), config=ds_config(Case("", 3, "cpu", "fp32"), 2))
    for _ in range(3):
        loss, three = engine(rows(8)[0])
        engine.backward(loss)
        engine.step()
        assert three == 3
    kind = type(engine.module)
    names = (kind.__name__, kind.__qualname__, kind.__module__)
    result = (engine.module.one.weight is engine.module.other.weight, masters(engine)["one.weight"], names)
    engine.destroy()
    return result


def test_tied_weights_of_a_custom_module_stay_tied_and_its_class_keeps_its_name() -> None:
    """Libraries choose by the name of a class: the Trainer, whether labels are shifted."""
    is_tied, weight, names = run_on_ranks(2, tied_job)[0]
    torch.manual_seed(2)
    model = Twin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)
    for _ in range(3):
        for rank in range(2):
            x = torch.randn(8, 5, generator=torch.Generator().manual_seed(rank))
            (model(x)[0] / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
    assert is_tied and torch.allclose(weight, model.one.weight, atol=1e-6)
    assert names == ("Twin", "Twin", __name__)


MISTAKEN = """
import heavylift, torch
model = torch.nn.Linear(2, 2)
config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}}
engine, *_ = heavylift.initialize(model=model, config=config)
try:
    heavylift.initialize(model=3, config=config)
except heavylift.UserError:
    print("caught")
engine.backward(torch.ones(1))
"""


def test_a_mistake_of_a_script_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MISTAKEN)
    env = {k: v for k, v in command_env().items() if k not in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and done.stdout == "caught\n"
    assert done.stderr.splitlines() == [
        f"error: {script}:10: backward: the loss depends on no trained parameter; run forward with gradients, through "
        "engine(...)"
    ]
