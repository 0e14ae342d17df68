"""The optimizer's state_dict: torch's shape, a round trip to the bit, resharding through torch's own checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import make_steps
from ranks.pool import run_on_ranks
from ranks.sharded import Setup, build, take_step, whole_states, whole_weights
from torch import nn

from heavylift.config.schema import Tier
from heavylift.engine import Engine
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions

STEPS = make_steps(4, VOCAB)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def odd_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_odd_llama(tmp_path_factory.mktemp("models") / "odd", tied=False)


def same_bits(a: Tensors, b: Tensors) -> bool:
    """Names and all bits."""
    if a.keys() != b.keys():
        return False
    return all(torch.equal(a[n].reshape(-1).view(torch.uint8), b[n].reshape(-1).view(torch.uint8)) for n in a)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Of the model that `make_optimizer` makes."""
    first = {"params": [model["a"]], "weight_decay": 0.1}
    return [first, {"params": [model["b"], model["unused"]], "lr": 3e-3, "weight_decay": 0.0}]


def make_optimizer(options: TieredOptions, seed: int = 0) -> tuple[nn.Module, TieredAdamW]:
    """Three parameters (one without gradient) in two groups."""
    torch.manual_seed(seed)
    model = nn.ParameterDict({"a": torch.randn(7, 5), "b": torch.randn(5), "unused": torch.randn(3)})
    return model, TieredAdamW(two_groups(model), lr=1e-2, options=options)


def take_plain_steps(model: nn.Module, optimizer: TieredAdamW, num_steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(num_steps):
        (torch.randn(4, 7) @ model["a"] + model["b"]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_it_looks_like_torchs() -> None:
    model, optimizer = make_optimizer(TieredOptions(tier=Tier.HOST, ratio=0.5))
    assert optimizer.state_dict()["state"] == {}
    take_plain_steps(model, optimizer, 2, seed=1)
    twin = torch.optim.AdamW(two_groups(model), lr=1e-2)
    (model["a"].sum() + model["b"].sum()).backward()
    twin.step()
    ours, torchs = optimizer.state_dict(), twin.state_dict()
    assert ours["state"].keys() == torchs["state"].keys()
    assert [g["params"] for g in ours["param_groups"]] == [g["params"] for g in torchs["param_groups"]]
    for index, entry in torchs["state"].items():
        assert entry.keys() <= ours["state"][index].keys()
        assert all(ours["state"][index][name].shape == entry[name].shape for name in entry)
    for ours_group, torchs_group in zip(ours["param_groups"], torchs["param_groups"], strict=True):
        own = {"bias_correction": True}  # torch's has no such choice
        assert ours_group == {**{key: torchs_group[key] for key in ours_group.keys() - own}, **own}
        assert {"lr", "betas", "eps", "weight_decay", "params"} <= ours_group.keys()


@pytest.mark.parametrize("target", [TieredOptions(), TieredOptions(tier=Tier.HOST), TieredOptions(Tier.HOST, 0.6)])
@pytest.mark.parametrize("saved_to_file", [False, True])
def test_round_trip_into_other_tiers(target: TieredOptions, saved_to_file: bool, tmp_path: Path) -> None:
    model, optimizer = make_optimizer(TieredOptions(tier=Tier.HOST, ratio=0.3))
    take_plain_steps(model, optimizer, 3, seed=1)
    saved: Any = optimizer.state_dict()
    if saved_to_file:
        torch.save(saved, tmp_path / "state.pt")
        saved = torch.load(tmp_path / "state.pt", weights_only=True)
    other_model, other = make_optimizer(target, seed=9)
    with torch.no_grad():
        other_model["unused"].copy_(model["unused"])  # never stepped: in no state_dict, as in torch
    other.load_state_dict(saved)
    for pair in ((model, optimizer), (other_model, other)):
        take_plain_steps(*pair, 2, seed=2)
    assert same_bits(dict(model.state_dict()), dict(other_model.state_dict()))
    assert other.param_groups[1]["lr"] == 3e-3


def test_other_parameters_are_refused() -> None:
    model, optimizer = make_optimizer(TieredOptions())
    take_plain_steps(model, optimizer, 1, seed=1)
    other = TieredAdamW([nn.Parameter(torch.zeros(7, 5))])
    with pytest.raises(ValueError, match=r"groups of sizes \[1, 2\], this one \[1\]"):
        other.load_state_dict(optimizer.state_dict())
    wrong = TieredAdamW(
        [{"params": [nn.Parameter(torch.zeros(7, 6))]}, {"params": [nn.Parameter(torch.zeros(n)) for n in (5, 3)]}]
    )
    with pytest.raises(ValueError, match="has 35 elements, expected 42"):
        wrong.load_state_dict(optimizer.state_dict())


def test_an_optimizer_itself_is_not_copied() -> None:
    _, optimizer = make_optimizer(TieredOptions())
    with pytest.raises(TypeError, match=r"TieredAdamW cannot be copied: .*its state_dict\(\) instead$"):
        copy.deepcopy(optimizer)


# ---- sharded: copies in memory and in files --------------------------------------------------------------------------


def copies_job(folder: Path, setup: Setup, path: Path) -> dict[str, bool]:
    """Which ways to copy the optimizer's state_dict give all of its bits, also after another step; and that the
    state_dict itself is no copy."""
    engine = build(folder, setup)
    take_step(engine, STEPS[0])
    before = whole_states(engine)
    state = engine.optimizer.state_dict()
    views = {entry[name].to_local().data_ptr() for entry in state["state"].values() for name in ("master", "exp_avg")}
    file = path / f"{dist.get_rank()}.pt"
    torch.save(state, file)
    copies = {"deepcopy": copy.deepcopy(state)}
    saved = dcp.async_save({"optimizer": state}, checkpoint_id=path / "dcp")
    saved.result()
    take_step(engine, STEPS[1])
    copies["file"] = torch.load(file, weights_only=False)
    parts = [part for parts in engine.optimizer.parts for part in parts]
    found = {"own memory": {part.exp_avg.data_ptr() for part in parts if part.start == 0} <= views}
    for name, copied in copies.items():
        engine.optimizer.load_state_dict(copied)
        found[name] = same_bits(before, whole_states(engine))
    return found


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_sharded_states_are_copied_as_torchs_are(tier: Tier, odd_llama: Path, tmp_path: Path) -> None:
    for found in run_on_ranks(2, copies_job, odd_llama, Setup(tier=tier, ratio=1.0), tmp_path):
        assert all(found.values()), found


# ---- sharded, through torch.distributed.checkpoint ----------------------------------------------------------------


def train_and_save_job(folder: Path, setup: Setup, checkpoint: Path) -> dict[str, Any]:
    """Two steps, a DCP save of the optimizer, and two more steps."""
    engine = build(folder, setup)
    for rows in STEPS[:2]:
        take_step(engine, rows)
    saved = {**whole_weights(engine), **whole_states(engine)}
    dcp.save({"optimizer": engine.optimizer.state_dict()}, checkpoint_id=checkpoint)
    return {"saved": saved, "losses": [take_step(engine, rows).loss for rows in STEPS[2:]]}


def load_and_train_job(folder: Path, setup: Setup, checkpoint: Path) -> dict[str, Any]:
    """The same from the checkpoint, on however many ranks; the model file holds other weights."""
    engine = build(folder, setup)
    restore(engine, checkpoint)
    loaded = {**whole_weights(engine), **whole_states(engine)}
    return {"loaded": loaded, "losses": [take_step(engine, rows).loss for rows in STEPS[2:]]}


def restore(engine: Engine, checkpoint: Path) -> None:
    # DCP loads into tensors that are there: one step fills the state_dict, loading then overwrites all of it
    take_step(engine, STEPS[0])
    state = {"optimizer": engine.optimizer.state_dict()}
    dcp.load(state, checkpoint_id=checkpoint)
    engine.optimizer.load_state_dict(state["optimizer"])
    dist.barrier()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", ["host_to_part", "bfloat16"])
def test_a_checkpoint_of_2_ranks_goes_on_on_others(
    world: int, kind: str, odd_llama: Path, tmp_path: Path, checkpoints: dict[str, tuple[Path, dict[str, Any]]]
) -> None:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    checkpoint, before = saved_on_2_ranks(kind, Setup(two_groups=True, dtype=dtype), odd_llama, checkpoints)
    other = save_odd_llama(tmp_path / "other", tied=False, std=0.7)
    target = Setup(two_groups=True, dtype=dtype, ratio=0.37, stage=world % 2 + 2)
    after = run_on_ranks(world, load_and_train_job, other, target, checkpoint)[0]
    assert same_bits(before["saved"], after["loaded"])
    if world == 2:
        assert after["losses"] == before["losses"]
    # other numbers of ranks sum in another order
    assert after["losses"] == pytest.approx(before["losses"], rel=2e-6 if dtype == torch.float32 else 5e-3)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Filled by `saved_on_2_ranks`: one training run per kind."""
    return {"folder": tmp_path_factory.mktemp("checkpoints")}


def saved_on_2_ranks(kind: str, setup: Setup, folder: Path, made: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    if kind not in made:
        path = made["folder"] / kind
        made[kind] = (path, run_on_ranks(2, train_and_save_job, folder, setup, path)[0])
    return made[kind]
