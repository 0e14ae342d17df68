"""`zero.Init` and `GatheredParameters`: models built split over the ranks, and parameters whole for a while."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import make_steps
from ranks.pool import run_on_ranks
from ranks.sharded import Setup, build, take_step, whole_weights
from torch import nn
from torch.distributed.tensor import DTensor

import heavylift
from heavylift.api import parameters as utils
from heavylift.api import zero, zero_init
from heavylift.api.owners import register_optimizer
from heavylift.api.partition import ZeroParamStatus, is_closed
from heavylift.errors import UserError

STEPS = make_steps(4, VOCAB)


@pytest.fixture(scope="module")
def odd_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_odd_llama(tmp_path_factory.mktemp("models") / "odd", tied=False)


class Net(nn.Module):
    """Code that comes back to its parameters in every way that constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(11, 11) for _ in range(3))
        self.embed = nn.Embedding(13, 11)
        self.head = nn.Linear(11, 13, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.scale = nn.Parameter(torch.ones(11))
        self.encoder = nn.TransformerEncoderLayer(11, 1, 5)
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)
        self.register_buffer("table", torch.randn(4))
        self.apply(self._init_weights)
        for param in self.encoder.parameters():
            if param.dim() > 1:
                nn.init.xavier_uniform_(param)
        with torch.no_grad():
            self.inner[0].weight.mul_(2)
            self.scale.add_(self.inner[1].bias)
        self.inner[2].bias.data.normal_()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            module.bias is not None and nn.init.ones_(module.bias)


def whole_of(model: nn.Module) -> dict[str, torch.Tensor]:
    with zero.GatheredParameters(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def built(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def init_job(seed_step: int, dtype: torch.dtype | None) -> list[str]:
    """Ranks have their own seed when `seed_step` is not 0; rank 0's counts."""
    zero_init.OPEN_BYTES, zero_init.MIN_OPEN = 600, 3  # a few small parameters at a time
    wrong = []
    plain = built(5)
    expected = {n: p.detach().to(dtype or p.dtype) for n, p in plain.named_parameters()}
    with zero.Init(dtype=dtype):
        model = built(5 + seed_step * dist.get_rank())
    alone = dist.get_world_size() == 1
    for name, param in model.named_parameters():
        if not alone and (param.shape != (0,) or param.ds_shape != expected[name].shape):
            wrong.append(f"{name} is not split: {param.shape}")
        if not alone and param.ds_status is not ZeroParamStatus.NOT_AVAILABLE:
            wrong.append(f"{name} says {param.ds_status}")
    values = whole_of(model)
    if values.keys() != expected.keys():
        wrong.append("names")
    wrong += [f"{n} differs" for n in expected if not torch.equal(values[n], expected[n])]
    if model.head.weight is not model.embed.weight or model.frozen.requires_grad:
        wrong.append("a tie or a frozen parameter")
    if seed_step == 0 and not torch.equal(model.table, plain.table):
        wrong.append("buffer")
    return wrong


@pytest.mark.parametrize(("world_size", "seed_step", "dtype"), [(2, 0, None), (2, 3, torch.bfloat16), (1, 0, None)])
def test_the_weights_are_those_of_the_plain_constructor(
    world_size: int, seed_step: int, dtype: torch.dtype | None
) -> None:
    assert run_on_ranks(world_size, init_job, seed_step, dtype) == [[]] * world_size


@pytest.mark.soak
def test_the_weights_on_four_ranks() -> None:
    assert run_on_ranks(4, init_job, 1, None) == [[]] * 4


def peak_job() -> tuple[int, int]:
    """(most bytes of parameters that were whole at a time, bytes of the model)."""
    zero_init.OPEN_BYTES, zero_init.MIN_OPEN = 5000, 2
    peak = 0

    class Block(nn.Linear):
        def __init__(self) -> None:
            super().__init__(32, 32)
            nonlocal peak
            here = [p for p in seen if not is_closed(p)] + list(self._parameters.values())
            peak = max(peak, sum(p.nbytes for p in here))
            seen.extend(self._parameters.values())

    seen: list[Any] = []
    with zero.Init():
        model = nn.Sequential(*(Block() for _ in range(20)))
    return peak, sum(p.ds_numel * 4 for p in model.parameters())


def test_only_a_few_parameters_are_whole_at_a_time() -> None:
    for peak, total in run_on_ranks(2, peak_job):
        assert total == 20 * (32 * 32 + 32) * 4
        assert peak <= 5000 + 2 * 32 * 32 * 4 + 256 < total / 5


def gathered_job() -> list[str]:
    """Parameters of zero.Init: read, written by one rank, nested, left by an error."""
    wrong = []
    with zero.Init():
        model = built(0)
    before = whole_of(model)
    rank = dist.get_rank()
    weight = model.inner[1].weight
    with zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        weight.fill_(7.0 + rank)
    if not bool((whole_of(model)["inner.1.weight"] == 8).all()):
        wrong.append("rank 1's values were not taken")
    with zero.GatheredParameters([weight]), torch.no_grad():
        weight.fill_(3.0)
        with zero.GatheredParameters([weight, model.scale]):
            if weight.shape != (11, 11) or model.scale.shape != (11,):
                wrong.append("nested")
        if weight.shape != (11, 11) or model.scale.shape != (0,):
            wrong.append("after nested")
    try:
        with zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.fill_(2.0)
            raise KeyError("x")
    except KeyError:
        pass
    after = whole_of(model)
    if not bool((after["inner.1.weight"] == 8).all()):
        wrong.append("reading or an error left something behind")
    if any(not torch.equal(before[n], after[n]) for n in before if n != "inner.1.weight"):
        wrong.append("another parameter has changed")
    with zero.GatheredParameters(weight, enabled=False):
        if weight.shape != (0,):
            wrong.append("not enabled")
    plain = nn.Linear(2, 2)
    with zero.GatheredParameters(plain), torch.no_grad():
        plain.weight.fill_(1.0)
    if not bool((plain.weight == 1).all()):
        wrong.append("a plain parameter keeps what is written")
    return wrong


def test_parameters_of_init_are_gathered() -> None:
    assert run_on_ranks(2, gathered_job) == [[], []]


def module_job() -> bool:
    """An existing module split at once."""
    model = built(1)
    expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    zero.Init(module=model)
    closed = all(is_closed(p) for p in model.parameters())
    values = whole_of(model)
    return closed and all(torch.equal(values[n], expected[n]) for n in expected)


def test_an_existing_module_is_split() -> None:
    assert run_on_ranks(2, module_job) == [True, True]


# ---- an engine's parameters ------------------------------------------------------------------------------------------


def engine_job(folder: Path, setup: Setup) -> list[str]:
    """Reading, writing, changing nothing; forward inside; training afterwards."""
    wrong = []
    engine = build(folder, setup)
    register_optimizer(engine.optimizer)
    take_step(engine, STEPS[0])
    module = engine.module
    masters = {n: utils.safe_get_full_fp32_param(p) for n, p in module.named_parameters()}
    weights = whole_weights(engine)
    params = dict(module.named_parameters())
    with zero.GatheredParameters(list(params.values()), modifier_rank=0):
        for name, param in params.items():
            if isinstance(param, DTensor) or not torch.equal(param, weights[name]):
                wrong.append(f"{name} is not whole")
            if getattr(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) is not param:
                wrong.append(f"{name} is another object")
    for name, param in module.named_parameters():
        if param is not params[name] or (setup.stage > 0 and not isinstance(param, DTensor)):
            wrong.append(f"{name} is not sharded again")
        if not torch.equal(utils.safe_get_full_fp32_param(param), masters[name]):
            wrong.append(f"{name}: looking at it has cost precision")
    ids = torch.arange(1, 6)[None]
    with torch.no_grad():
        expected = module(input_ids=ids).logits
        with zero.GatheredParameters(module.parameters()):
            inside = module(input_ids=ids).logits
        with zero.unwrap_model_for_generation(module) as unwrapped:
            generated = [unwrapped(input_ids=ids).logits for _ in range(2)]
        engine.sharded.reshard()
        wrong += ["forward"] if not all(torch.equal(expected, x) for x in [inside, *generated]) else []
    head = module.lm_head.weight
    for modifier_rank in (None, 0):
        try:
            with zero.GatheredParameters(head, modifier_rank=modifier_rank), torch.no_grad():
                head.zero_()
                if modifier_rank is not None:
                    raise KeyError("left by an error")
        except KeyError:
            pass
    if not torch.equal(whole_weights(engine)["lm_head.weight"], weights["lm_head.weight"]):
        wrong.append("what should be discarded was kept")
    last = dist.get_world_size() - 1
    with zero.GatheredParameters(head, modifier_rank=last), torch.no_grad():
        if dist.get_rank() == last:
            head[3] = 0.5
    value, master = weights["lm_head.weight"].clone(), masters["lm_head.weight"].clone()
    value[3], master[3] = 0.5, 0.5
    if not torch.equal(whole_weights(engine)["lm_head.weight"], value):
        wrong.append("the write was lost")
    if not torch.equal(utils.safe_get_full_fp32_param(head), master):
        wrong.append("the master does not follow, or not only there")
    take_step(engine, STEPS[1])
    moved = whole_weights(engine)["lm_head.weight"]
    if torch.equal(moved, value) or float((moved - value).abs().max()) > 0.1:
        wrong.append("training does not go on from there")
    take_step(engine, STEPS[2])  # its step on the host may still be under way
    with torch.no_grad(), zero.unwrap_model_for_generation(module) as unwrapped:
        early = unwrapped(input_ids=ids).logits
    engine.optimizer.synchronize()
    with torch.no_grad():
        wrong += ["generates with old weights"] if not torch.equal(early, module(input_ids=ids).logits) else []
    engine.optimizer.close()
    return wrong


@pytest.mark.parametrize(
    "setup",
    [
        Setup(stage=3, schedule="deferred", ratio=0.7, dtype=torch.bfloat16),
        Setup(stage=2, tier="device"),
    ],
)
def test_parameters_of_an_engine_are_gathered(odd_llama: Path, setup: Setup) -> None:
    assert run_on_ranks(2, engine_job, odd_llama, setup) == [[], []]


def test_on_one_rank(odd_llama: Path) -> None:
    assert run_on_ranks(1, engine_job, odd_llama, Setup(stage=3, schedule="deferred")) == [[]]


def patterns_job() -> list[str]:
    """What scripts do that look at `ds_id`, `ds_status` and `ds_numel`, before and after initialize."""
    wrong = []

    def value_of(param: Any) -> torch.Tensor:
        if not hasattr(param, "ds_id"):
            return param.detach().cpu().clone()
        if param.ds_status == ZeroParamStatus.NOT_AVAILABLE:
            with zero.GatheredParameters([param]):
                return param.data.detach().cpu().clone()
        return param.data.detach().cpu().clone()

    def numel_of(param: Any) -> int:
        return param.ds_numel if param.numel() == 0 and hasattr(param, "ds_numel") else param.numel()

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    expected = {name: p.detach().clone() for name, p in plain.named_parameters()}
    torch.manual_seed(0)
    with zero.Init():
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.0}}}
    for stage in (None, 3):
        if stage is not None:
            config["zero_optimization"] = {"stage": stage}
            engine, *_ = heavylift.initialize(model=model, config=config)
            engine.backward(engine(torch.ones(2, 7)).sum())
            engine.step()
        for name, param in model.named_parameters():
            if type(value_of(param)) is not torch.Tensor or not torch.equal(value_of(param), expected[name]):
                wrong.append(f"{name} at stage {stage}")
            if param.ds_shape != expected[name].shape or numel_of(param) != expected[name].numel():
                wrong.append(f"size of {name} at stage {stage}")
    engine.destroy()
    return wrong


def test_scripts_that_look_at_the_parameters() -> None:
    assert run_on_ranks(2, patterns_job) == [[], []]


def frozen_job(folder: Path) -> bool:
    engine = build(folder, Setup(stage=3, freeze=("model.embed_tokens.*",)))
    register_optimizer(engine.optimizer)
    param = engine.module.model.embed_tokens.weight
    assert not param.requires_grad
    with zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
        param.fill_(0.25 + dist.get_rank())
    engine.optimizer.close()
    return bool((param.full_tensor() == 0.25).all())


def test_frozen_parameters_are_gathered_too(odd_llama: Path) -> None:
    assert run_on_ranks(2, frozen_job, odd_llama) == [True, True]


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="use zero.Init"):
        zero.MiCS_Init(config_dict_or_path={})
    with pytest.raises(UserError, match="use nn.Linear"):
        zero.TiledLinear(4, 4)
    with pytest.raises(UserError, match='remote_device "nvme"'):
        zero.Init(remote_device="nvme")
    with pytest.raises(UserError, match="^zero.Init: dtype= should be a dtype such as torch.bfloat16, got 'bf16'$"):
        zero.Init(dtype="bf16")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"modifier_rank should be one of the 1 ranks \(from 0\), got 1"):
        zero.GatheredParameters([], modifier_rank=1)
    with pytest.raises(UserError, match="expected parameters or a module, got str"):
        zero.GatheredParameters(["weight"])  # type: ignore[list-item]
    with pytest.raises(UserError, match="expected parameters or a module, got int"):
        zero.GatheredParameters(5)  # type: ignore[arg-type]
    zero.register_external_parameter(nn.Linear(1, 1), nn.Parameter(torch.zeros(1)))


@pytest.mark.parametrize("argument", ["config_dict_or_path", "config"])
def test_a_wrong_configuration_is_refused_before_the_model_is_built(argument: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{\n  "train_batch_size": 4,\n  "zero_optimization": {"stagee": 3}\n}')
    for given, message in (
        ("nofile.json", "nofile.json: no such file"),
        ({"zero_optimisation": {"stage": 3}}, "ds_config: zero_optimisation: unknown key; did you mean zero_opt"),
        (str(path), f"{path}:3: zero_optimization.stagee: unknown key"),
        (7, "expected a mapping, a path or base64 text, got 7"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            zero.Init(**{argument: given})
    # what a trainer fills in later, and what only `initialize` can add up, is no mistake yet
    zero.Init(**{argument: "nofile.json", "enabled": False})
    assert not dist.is_initialized()
    try:
        zero.Init(**{argument: {"train_micro_batch_size_per_gpu": "auto", "optimizer": {"type": "AdamW"}}})
        zero.Init(**{argument: {"zero_optimization": {"stage": 3}}})
    finally:
        dist.destroy_process_group()


def test_not_enabled_nothing_happens() -> None:
    with zero.Init(enabled=False):
        assert nn.Linear(3, 2).weight.shape == (2, 3)
    assert nn.Module.register_parameter.__qualname__ == "Module.register_parameter"
