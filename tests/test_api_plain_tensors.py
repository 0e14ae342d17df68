"""What scripts do with a model's weights as if it were not sharded: loading whole tensors into it, save_pretrained."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_api.models import make_llama
from parity_api.small import message_of
from ranks.gather import whole
from ranks.pool import run_on_fresh_ranks, run_on_ranks
from torch import nn

import heavylift

Tensors = dict[str, torch.Tensor]


class Net(nn.Module):
    """A layer that is gathered by itself and the rest, with a scalar; two ranks do not divide the rows."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5)])
        self.head = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head(self.layers[0](x).tanh()) * self.scale).square().mean()


def make(model: nn.Module, stage: int, precision: str = "fp32") -> Any:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.05}}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return heavylift.initialize(model=model, config=config)[0]


def step(engine: Any) -> None:
    x = torch.linspace(-1, 1, 20).view(4, 5) + dist.get_rank()
    engine.backward(engine(x.to(engine.module.head.weight.dtype)).float())
    engine.step()


def weights(engine: Any) -> Tensors:
    engine.settle()
    return {name: whole(t) for name, t in engine.module.state_dict().items()}


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- load_state_dict of the module itself ---------------------------------------------------------------------------


def by_module(engine: Any, values: Tensors) -> None:
    engine.module.load_state_dict(values)


def by_module_after_a_forward(engine: Any, values: Tensors) -> None:
    with torch.no_grad():
        engine.module(torch.ones(4, 5, dtype=engine.module.head.weight.dtype))
    engine.module.load_state_dict(values)


def by_parts(engine: Any, values: Tensors) -> None:
    with torch.no_grad():  # leaves the parts gathered
        engine.module(torch.ones(4, 5, dtype=engine.module.head.weight.dtype))
    for name in ("layers", "head"):
        part = {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
        engine.module.get_submodule(name).load_state_dict(part)
    rest = {key: value for key, value in values.items() if "." not in key}
    assert engine.module.load_state_dict(rest, strict=False).unexpected_keys == []


def by_rank_0(engine: Any, values: Tensors) -> None:
    """DeepSpeed's way at stage 3."""
    with heavylift.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            values = {**values, "scale": values["scale"].reshape(1)}
            engine.module.load_state_dict(values)
    engine.module.seen.copy_(values["seen"])


def load_job(stage: int, precision: str) -> list[str]:
    """Against the engine's own `load_state_dict`, which other tests hold to the plain one."""
    wrong = []
    torch.manual_seed(5)
    values = {name: torch.randn_like(t) for name, t in Net().state_dict().items()}
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    values = {name: t.to(dtype) if name != "seen" else t for name, t in values.items()}
    given = {name: t.clone() for name, t in values.items()}
    results = {}
    for load in (lambda e, v: e.load_state_dict(v), by_module, by_module_after_a_forward, by_parts, by_rank_0):
        torch.manual_seed(0)
        engine = make(Net(), stage, precision)
        step(engine)
        load(engine, values)
        results[load.__name__] = [weights(engine)]
        step(engine)
        results[load.__name__].append(weights(engine))
        engine.destroy()
    expected = results.pop("<lambda>")
    if not same(expected[0], {**values, "scale": values["scale"].reshape(1)}):
        wrong.append("the engine itself")
    for name, (loaded, stepped) in results.items():
        wrong += [] if same(expected[0], loaded) else [f"{name}: weights"]
        wrong += [] if same(expected[1], stepped) else [f"{name}: the next step"]
    return wrong + ([] if same(given, values) else ["what was given is changed"])


@pytest.mark.parametrize(
    ("world", "stage", "precision"), [(2, 0, "bf16"), (2, 2, "fp32"), (2, 3, "bf16"), (1, 1, "fp32")]
)
def test_a_module_loads_whole_tensors(world: int, stage: int, precision: str) -> None:
    assert run_on_ranks(world, load_job, stage, precision) == [[]] * world


def wrong_load_job() -> list[str]:
    engine = make(Net(), 3)
    before, values = weights(engine), Net().state_dict()
    messages = [message_of(lambda: engine.module.load_state_dict(values, assign=True))]
    for bad in ({**values, "head.weight": torch.zeros(3, 7)}, {**values, "unknown": torch.zeros(1)}):
        with pytest.raises(RuntimeError) as raised:
            engine.module.load_state_dict({**bad})
        messages.append(str(raised.value))
    assert before.keys() == weights(engine).keys()
    step(engine)
    return messages


def test_what_does_not_fit_is_what_torch_says() -> None:
    for assign, shape, unknown in run_on_ranks(2, wrong_load_job):
        assert assign == "load_state_dict: assign=True would replace the sharded parameters; leave it out"
        assert "size mismatch for head.weight" in shape and "[3, 7]" in shape
        assert 'Unexpected key(s) in state_dict: "unknown"' in unknown


# ---- what docs/deepspeed.md says of other habits ------------------------------------------------------------------


def habits_job(stage: int) -> dict[str, Any]:
    from heavylift.compat.deepspeed.checkpoint.utils import clone_tensors_for_torch_save

    torch.manual_seed(0)
    engine, found, x = make(Net(), stage), {}, torch.linspace(0, 1, 20).view(4, 5)
    engine.settle()
    ema = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    plain_ema = weights(engine)
    for _ in range(3):
        step(engine)
        now = weights(engine)
        with torch.no_grad():
            for name, param in engine.module.named_parameters():
                ema[name].lerp_(param, 0.1)
                plain_ema[name].lerp_(now[name], 0.1)
    engine.load_state_dict({**engine.state_dict(), **ema})
    found["average"] = same(weights(engine), plain_ema)
    plain = Net()
    plain.load_state_dict(clone_tensors_for_torch_save(engine.module.state_dict()))
    with torch.no_grad():
        found["copied"] = float(plain(x)) == float(engine(x))
    largest = [p.detach().full_tensor().abs().max().item() for p in engine.module.parameters()]
    found["largest"] = largest == [p.detach().abs().max().item() for p in plain.parameters()]
    with heavylift.zero.unwrap_model_for_generation(engine) as model, torch.no_grad():
        if dist.get_rank() == 0:
            found["alone"] = [float(model(x)) for _ in range(2)] == [float(plain(x))] * 2
    if stage == 0 and dist.get_rank() == 0:
        engine.eval()
        with torch.no_grad():
            found["alone in stage 0"] = [float(engine(x)) for _ in range(2)] == [float(plain(x))] * 2
    step(engine.train())
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_habits_as_the_docs_have_them(stage: int) -> None:
    first, second = run_on_ranks(2, habits_job, stage)
    assert first.keys() - second.keys() == {"alone"} | ({"alone in stage 0"} if stage == 0 else set())
    assert all(first.values()) and all(second.values()), (first, second)


# ---- save_pretrained ------------------------------------------------------------------------------------------------


class Around(nn.Module):
    """A model of transformers inside of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_llama()

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


def save_job(stage: int, precision: str, folder: Path) -> dict[str, Any]:
    engine = make(make_llama(), stage, precision)
    ids = torch.arange(1, 9).view(2, 4) + dist.get_rank()
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    rank = dist.get_rank()
    with torch.no_grad():
        engine.module(input_ids=ids)  # leaves parameters gathered
    engine.module.save_pretrained(folder / "plain")
    engine.module.save_pretrained(folder / "main", is_main_process=rank == 0, max_shard_size="5KB")
    engine.module.save_pretrained(folder / "given", state_dict=engine.consolidated_state_dict())
    consolidated = engine.consolidated_state_dict()
    if rank == 0:
        engine.module.save_pretrained(str(folder / "alone"), True, consolidated)
    if stage == 0 and rank == 0:
        engine.module.save_pretrained(folder / "whole")
    found = {"expected": engine.consolidated_state_dict()}
    if rank == 0 and stage > 0:
        found["none"] = message_of(lambda: engine.module.save_pretrained(folder / "none", state_dict=None))
    around = make(Around(), stage, precision)
    around.module.inner.save_pretrained(folder / "inner")
    found["inner"] = around.consolidated_state_dict()
    dist.barrier()
    return found


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "bf16"), (3, "fp32")])
def test_save_pretrained_writes_the_whole_weights(stage: int, precision: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    found, other = run_on_ranks(2, save_job, stage, precision, tmp_path)
    assert other["expected"] is None
    folders = ["plain", "main", "given", "alone"] + (["whole"] if stage == 0 else [])
    for name in folders:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert model.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
        assert same(dict(model.state_dict()), found["expected"]), name
    assert len(list((tmp_path / "main").glob("model-*.safetensors"))) > 1
    inner = AutoModelForCausalLM.from_pretrained(tmp_path / "inner").state_dict()
    assert same({f"inner.{name}": t for name, t in inner.items()}, found["inner"])
    if stage > 0:
        assert found["none"].startswith(
            "save_pretrained: state_dict=None on rank 0; leave state_dict out on every rank"
        )
        assert not (tmp_path / "none").exists()


def lonely_job(folder: Path) -> str:
    """Rank 0 alone saves sharded weights."""
    from heavylift.api import checkpoint

    checkpoint.ARRIVAL_TIMEOUT = timedelta(seconds=2)
    engine = make(make_llama(), 2)
    message = message_of(lambda: engine.module.save_pretrained(folder)) if dist.get_rank() == 0 else ""
    engine.destroy()
    return message


@pytest.mark.soak
def test_rank_0_alone_does_not_wait_for_ever(tmp_path: Path) -> None:
    message, _ = run_on_fresh_ranks(2, lonely_job, tmp_path)
    assert message.startswith("save_pretrained: not every rank has called it within 2 s") and "\n" not in message
