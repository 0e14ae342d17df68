"""Parameters as a forward leaves them: gathered, other objects than the optimizer's. Reading, setting and writing them
means the same as when they are sharded, or is one clear line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_api.small import message_of
from ranks.gather import whole
from ranks.pool import run_on_ranks
from torch import nn
from torch.distributed.tensor import DTensor

import heavylift
from heavylift import utils
from heavylift.api.gathered import find_place

Tensors = dict[str, torch.Tensor]


class Block(nn.Module):
    """A layer, gathered by itself. Calls `inside`, if there is one, in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.inside: Callable[[], Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inside is not None:
            self.inside()
        return self.linear(x).tanh()


class Net(nn.Module):
    """Two layers, and a head at the root."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def make(stage: int, precision: str = "bf16", optimizer: str = "AdamW") -> Any:
    torch.manual_seed(0)
    zero: dict[str, Any] = {"stage": stage}
    if stage > 0 and optimizer == "AdamW":
        zero["offload_optimizer"] = {"device": "cpu", "ratio": 0.6}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero}
    config["optimizer"] = {"type": optimizer, "params": {"lr": 0.05}}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    engine = heavylift.initialize(model=Net(), config=config)[0]
    step(engine)
    return engine


def rows(engine: Any) -> torch.Tensor:
    x = torch.linspace(-1, 1, 20).view(4, 5) + dist.get_rank()
    return x.to(engine.module.head.weight.dtype)


def step(engine: Any) -> None:
    engine.backward(engine(rows(engine)).float())
    engine.step()


def weights(engine: Any) -> Tensors:
    engine.settle()
    return {name: whole(p) for name, p in engine.module.named_parameters()}


def all_states(params: dict[str, nn.Parameter]) -> Tensors:
    found = {f"{name}.master": utils.safe_get_full_fp32_param(p) for name, p in params.items()}
    found |= {f"{n}.exp_avg": utils.safe_get_full_optimizer_state(p, "exp_avg") for n, p in params.items()}
    return {name: torch.empty(0) if value is None else value for name, value in found.items()}


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- which objects a script may hold -------------------------------------------------------------------------------


def as_sharded(engine: Any) -> dict[str, nn.Parameter]:
    engine.settle()
    return dict(engine.module.named_parameters())


def as_left_without_gradients(engine: Any) -> dict[str, nn.Parameter]:
    with torch.no_grad():
        engine.module(rows(engine))
    return dict(engine.module.named_parameters())


def as_left_by_a_forward(engine: Any) -> dict[str, nn.Parameter]:
    engine(rows(engine))
    return dict(engine.module.named_parameters())


def held_from_before(engine: Any) -> dict[str, nn.Parameter]:
    params = as_sharded(engine)
    as_left_by_a_forward(engine)
    return params


def held_from_a_forward(engine: Any) -> dict[str, nn.Parameter]:
    params = as_left_by_a_forward(engine)
    engine.settle()
    return params


HOLDS = (as_left_without_gradients, as_left_by_a_forward, held_from_before, held_from_a_forward)


def set_all(params: dict[str, nn.Parameter], by: str) -> None:
    """Other values, but for one element of each parameter that keeps its own."""
    last = dist.get_world_size() - 1
    if by == "setter":
        for param in params.values():
            value = torch.full(find_place(param).shard.shape, 0.3)  # type: ignore[union-attr]
            utils.safe_set_full_fp32_param(param, value)
        return
    with heavylift.zero.GatheredParameters(list(params.values()), modifier_rank=last), torch.no_grad():
        for param in params.values():
            assert not isinstance(param, DTensor)
            if dist.get_rank() == last:
                param.view(-1)[1:] = 0.3


def holds_job(stage: int, precision: str, optimizer: str) -> list[str]:
    """What differs from an engine whose sharded parameters a script holds."""
    wrong = []
    for by in ("setter", "gathered"):
        expected = make(stage, precision, optimizer)
        set_all(as_sharded(expected), by)
        right = all_states(as_sharded(expected))
        loss = float(expected(rows(expected)))
        step(expected)
        for hold in HOLDS:
            case = f"{hold.__name__}, {by}"
            engine = make(stage, precision, optimizer)
            before = all_states(as_sharded(engine))
            params = hold(engine)
            wrong += [] if same(before, all_states(params)) else [f"{case}: states are read"]
            with heavylift.zero.GatheredParameters(params.values()), torch.no_grad():
                for name, param in params.items():
                    if not torch.equal(param.float(), before[f"{name}.master"].to(param.dtype).float()):
                        wrong.append(f"{case}: {name} is whole")
                    param.fill_(9)
            wrong += [] if same(before, all_states(params)) else [f"{case}: what is discarded"]
            set_all(params, by)
            wrong += [] if same(right, all_states(params)) else [f"{case}: states after"]
            wrong += [] if float(engine(rows(engine))) == loss else [f"{case}: the next forward"]
            step(engine)
            wrong += [] if same(weights(expected), weights(engine)) else [f"{case}: the next step"]
            engine.destroy()
        expected.destroy()
    return wrong


@pytest.mark.parametrize(
    ("world", "stage", "precision", "optimizer"),
    [(2, 3, "bf16", "AdamW"), (2, 2, "fp32", "AdamW"), (2, 0, "bf16", "AdamW"), (1, 3, "bf16", "SGD")],
)
def test_gathered_parameters_are_the_engines_own(world: int, stage: int, precision: str, optimizer: str) -> None:
    assert run_on_ranks(world, holds_job, stage, precision, optimizer) == [[]] * world


# ---- in the middle of something -------------------------------------------------------------------------------------


def between_job(stage: int) -> dict[str, Any]:
    """Between a forward and its backward."""
    found = {}
    reader, plain, writer, setter = (make(stage, "fp32") for _ in range(4))
    loss = reader(rows(reader))
    with heavylift.zero.GatheredParameters(reader.module.parameters(), modifier_rank=0):
        pass
    all_states(dict(reader.module.named_parameters()))
    reader.backward(loss)
    reader.step()
    step(plain)
    found["looking"] = same(weights(plain), weights(reader))
    loss = writer(rows(writer))
    set_all({"weight": writer.module.head.weight}, "gathered")
    with pytest.raises(RuntimeError) as raised:
        writer.backward(loss)
    found["writing"] = str(raised.value)
    loss = setter(rows(setter))
    set_all({"weight": setter.module.head.weight}, "setter")
    with pytest.raises(RuntimeError) as raised:
        setter.backward(loss)
    found["setting"] = str(raised.value)
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_that_needs_what_was_written_says_so_on_every_rank(stage: int) -> None:
    for found in run_on_ranks(2, between_job, stage):
        assert found["looking"]
        assert "modified by an inplace operation" in found["writing"]
        assert "modified by an inplace operation" in found["setting"]


def inside_job(stage: int) -> dict[str, Any]:
    """In the forward of a layer, whose weight it reads and tries to set."""
    engine, plain = make(stage), make(stage)
    block, found = engine.module.blocks[1], {}
    master = utils.safe_get_full_fp32_param(block.linear.weight)

    def inside() -> None:
        weight = block.linear.weight
        with heavylift.zero.GatheredParameters(weight):
            found["whole"] = torch.equal(weight.detach(), master.to(weight.dtype))
        found["read"] = torch.equal(utils.safe_get_full_fp32_param(weight), master)
        gathering = heavylift.zero.GatheredParameters(weight, modifier_rank=0)
        found["write"] = message_of(lambda: gathering.__enter__())
        found["set"] = message_of(lambda: utils.safe_set_full_fp32_param(weight, master))

    block.inside = inside
    step(engine)
    step(plain)
    found["trains"] = same(weights(plain), weights(engine))
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_in_the_middle_of_a_forward_parameters_are_read_and_not_set(stage: int) -> None:
    for found in run_on_ranks(2, inside_job, stage):
        assert found["whole"] and found["read"] and found["trains"]
        assert found["write"].startswith("GatheredParameters: with modifier_rank, in the middle of the forward")
        assert found["set"].startswith("safe_set_*_fp32_param: a parameter cannot be set while the forward")


def lost_job(stage: int) -> dict[str, Any]:
    """A write into what a forward has left, without gathering anything."""
    found: dict[str, Any] = {}
    ends: dict[str, Callable[[Any], Any]] = {
        "step": step,
        "settle": lambda engine: engine.settle(),
        "state_dict": lambda engine: engine.module.state_dict(),
    }
    for what, end in ends.items():
        engine = make(stage)
        weight = as_left_without_gradients(engine)["head.weight"]
        with torch.no_grad():
            weight.fill_(0.5)
        found[what] = message_of(lambda end=end, engine=engine: end(engine))
    engine.settle()
    step(engine)
    found["once"] = engine.global_steps
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_write_that_would_be_lost_is_named(stage: int) -> None:
    for found in run_on_ranks(2, lost_job, stage):
        assert found["once"] == 2
        for what in ("step", "settle", "state_dict"):
            assert found[what].startswith(
                "head.weight was written while it was gathered for a forward, by it or after it, so "
            )


class Renormed(nn.Module):
    """Its forward writes its weight: torch keeps what it has written, and steps from there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5, max_norm=0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids).square().mean()


def forward_writes_job() -> str:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
    engine = heavylift.initialize(model=Renormed(), config=config)[0]
    engine.backward(engine(torch.arange(4)))
    return message_of(engine.step)


def test_a_forward_that_writes_its_weights_is_named() -> None:
    assert run_on_ranks(1, forward_writes_job)[0].startswith("embed.weight was written while it was gathered for a")


# ---- what is no parameter -------------------------------------------------------------------------------------------


def test_what_is_no_parameter_is_refused() -> None:
    for getter in (utils.safe_get_full_fp32_param, utils.safe_get_full_grad, utils.safe_get_local_grad):
        for given, named in ((3, "int"), (torch.zeros(2), "Tensor"), ("head.weight", "str")):
            expected = f"utils.safe_*: expected a parameter of the engine's module, got a {named}"
            assert message_of(lambda getter=getter, given=given: getter(given)) == expected
    assert "got a int" in message_of(lambda: utils.safe_set_full_fp32_param(3, torch.zeros(1)))  # type: ignore[arg-type]
    assert utils.safe_get_full_fp32_param(nn.Parameter(torch.zeros(2))) is None
