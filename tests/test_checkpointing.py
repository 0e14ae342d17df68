"""Activation checkpointing computes again what it was asked to, keeps inputs where it was asked to, changes no bit."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.cases import FREEZE
from ranks.llamas import llama_config
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import Trajectory, make_steps
from ranks.pool import run_on_ranks
from ranks.sharded import Setup, build, take_step, whole_weights
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from heavylift.config.schema import TrainConfig
from heavylift.errors import UserError
from heavylift.memory.boundaries import BoundaryStore
from heavylift.memory.checkpointing import checkpoint_layers
from heavylift.ranks import Ranks
from heavylift.sharding import layers_of
from heavylift.train.setup import keep_boundaries_on_host

CPU = torch.device("cpu")
NUM_LAYERS = 5
HIDDEN = 16
IDS = torch.arange(2 * 12).view(2, 12) % 50


@dataclass(frozen=True)
class How:
    """How layers are checkpointed; `every` 0: not at all."""

    every: int = 1
    selective: bool = False
    on_host: bool = False
    compiled: bool = False


def apply(model: nn.Module, how: How, slot_bytes: int = IDS.numel() * HIDDEN * 4) -> BoundaryStore | None:
    layers = layers_of(model)
    chosen = checkpoint_layers(layers, every=how.every, selective=how.selective) if how.every else []
    if how.compiled:
        for layer in layers:
            # the compiler's tracing and its split into forward and backward, without its code generation
            layer.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    if not how.on_host:
        return None
    store = BoundaryStore(len(chosen), slot_bytes, CPU)
    for layer in chosen:
        store.attach(layer)
    return store


def tiny_llama(attention: str = "sdpa") -> nn.Module:
    from transformers import LlamaForCausalLM

    dropout = 0.1 if attention == "eager" else 0.0
    config = llama_config(50, HIDDEN, 40, NUM_LAYERS, 4, 2, attn_implementation=attention, attention_dropout=dropout)
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Seen:
    """One forward and backward."""

    loss: Tensor
    grads: dict[str, Tensor | None]
    forwards: list[int]
    """How often each layer computed."""
    operators: Counter[Any]


def run(model: nn.Module) -> Seen:
    forwards = [0] * NUM_LAYERS
    handles = []
    for index, layer in enumerate(layers_of(model)):

        def count(*_: Any, index: int = index) -> None:
            forwards[index] += 1

        if layer._compiled_call_impl is None:  # a compiled layer would compile the hook, too
            handles.append(layer.self_attn.register_forward_pre_hook(count))
    torch.manual_seed(7)
    compiled = any(layer._compiled_call_impl is not None for layer in layers_of(model))
    operators = Operators()
    # the compiler refuses to work beneath a dispatch mode
    with nullcontext() if compiled else operators:
        loss = model(input_ids=IDS, use_cache=False).logits.square().mean()
        loss.backward()
    for handle in handles:
        handle.remove()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return Seen(loss.detach(), grads, forwards, operators.counts)


def assert_same_bits(a: Seen, b: Seen) -> None:
    assert torch.equal(a.loss, b.loss)
    for name, grad in a.grads.items():
        other = b.grads[name]
        assert (grad is None) == (other is None), name
        assert grad is None or other is None or torch.equal(grad, other), name


EAGER = [How(1), How(2), How(3), How(9), How(1, True), How(2, True), How(1, on_host=True), How(2, True, on_host=True)]


@pytest.mark.parametrize("how", EAGER, ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_same_bits_and_as_many_forwards_as_asked(how: How, attention: str) -> None:
    """With eager attention there is dropout, too: what is computed again draws the same numbers."""
    plain = run(tiny_llama(attention))
    assert plain.forwards == [1] * NUM_LAYERS
    model = tiny_llama(attention)
    names = list(model.state_dict())
    apply(model, how)
    assert list(model.state_dict()) == names
    seen = run(model)
    assert_same_bits(seen, plain)
    assert seen.forwards == [2 if index % how.every == 0 else 1 for index in range(NUM_LAYERS)]
    assert_same_bits(run(model), plain)


def test_selective_computes_no_matmul_and_no_attention_again() -> None:
    plain, full, selective = tiny_llama(), tiny_llama(), tiny_llama()
    apply(full, How(1))
    apply(selective, How(1, selective=True))
    counts = [run(model).operators for model in (plain, full, selective)]
    mm, silu = torch.ops.aten.mm.default, torch.ops.aten.silu.default
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    # 7 matrices a layer: q, k, v, o, gate, up, down; what follows the last of them is not computed again
    again = [{op: count[op] - counts[0][op] for op in (mm, silu, attention)} for count in counts]
    assert counts[0][mm] == 3 * (7 * NUM_LAYERS + 1) and counts[0][attention] == NUM_LAYERS
    assert again[1] == {mm: 6 * NUM_LAYERS, silu: NUM_LAYERS, attention: NUM_LAYERS}
    assert again[2] == {mm: 0, silu: NUM_LAYERS, attention: 0}


def test_evaluation_is_neither_checkpointed_nor_stored() -> None:
    model = tiny_llama()
    store = apply(model, How(1, on_host=True))
    assert store is not None
    with torch.no_grad():
        expected = tiny_llama()(input_ids=IDS).logits
        assert torch.equal(model(input_ids=IDS).logits, expected)
    model.eval()
    loss = model(input_ids=IDS, use_cache=False).logits.square().mean()
    loss.backward()
    assert store.usage.host_bytes == 0, "allocated at first use"


def test_slots_are_bounded_and_used_again() -> None:
    model = tiny_llama()
    store = apply(model, How(2, on_host=True))
    assert store is not None and store.usage.host_bytes == 0
    for _ in range(4):
        run(model)
        assert sorted(store.free_slots) == [0, 1, 2]
    assert store.num_bytes == 3 * IDS.numel() * HIDDEN * 4
    assert 0 <= store.usage.host_bytes - store.num_bytes < 4096, "one slab, in whole pages"
    # two forwards before one backward need twice the slots
    alive = model(input_ids=IDS, use_cache=False).logits.sum()
    assert not store.free_slots
    with pytest.raises(AssertionError, match="all 3 slots are taken"):
        model(input_ids=IDS, use_cache=False)
    del alive
    gc.collect()
    assert sorted(store.free_slots) == [0, 1, 2], "a forward that is dropped gives its slots back"
    assert_same_bits(run(model), run(tiny_llama()))


def test_backward_reads_the_slots() -> None:
    """What lies in the slots is what backward computes with: spoilt there, the gradients are wrong."""
    model = tiny_llama()
    store = apply(model, How(1, on_host=True))
    assert store is not None
    loss = model(input_ids=IDS, use_cache=False).logits.square().mean()
    assert len(store._slots) == NUM_LAYERS
    store._slots[2].view(torch.float32).mul_(3.0)
    loss.backward()
    plain = run(tiny_llama()).grads
    wrong = [n for n, p in model.named_parameters() if plain[n] is not None and not torch.equal(p.grad, plain[n])]
    assert any(".2." in name for name in wrong) and not any(".3." in name for name in wrong)


def test_an_input_that_is_too_large_is_reported() -> None:
    model = tiny_llama()
    apply(model, How(1, on_host=True), slot_bytes=64)
    with pytest.raises(UserError, match=r"train.cpu_checkpointing: .* at most 64 bytes .* got 1536 \(2, 12, 16\)"):
        model(input_ids=IDS, use_cache=False)


def test_slots_that_the_host_refuses_are_reported() -> None:
    model = tiny_llama()
    apply(model, How(1, on_host=True), slot_bytes=2**50)  # more than a process can address
    with pytest.raises(UserError, match="^train.cpu_checkpointing: host memory for the inputs of 5 layers: the "):
        model(input_ids=IDS, use_cache=False)


def test_slots_that_the_host_cannot_hold_are_refused_before_they_are_taken() -> None:
    model = tiny_llama()
    ranks = Ranks(rank=0, world_size=2, local_rank=0, local_world_size=2, device=CPU)
    with pytest.raises(UserError, match=r"inputs of 5 layers need 1024000.0 GiB of .* raise train.checkpoint_every"):
        keep_boundaries_on_host(checkpoint_layers(layers_of(model)), 100 * 2**40, ranks)
    store = keep_boundaries_on_host(layers_of(model), 100, ranks)
    assert (store.num_bytes, store.usage.host_bytes) == (5 * 128, 0), "in whole cache lines"


COMPILED = [How(1, compiled=True), How(1, True, compiled=True), How(2, True, True, True)]
# parts of the last
MORE_COMPILED = [
    pytest.param(how, marks=pytest.mark.soak) for how in (How(2, compiled=True), How(1, False, True, True))
]


@pytest.mark.parametrize("how", [*COMPILED, *MORE_COMPILED], ids=str)
def test_compiled_layers(how: How) -> None:
    torch._dynamo.reset()
    plain = run(tiny_llama())
    model = tiny_llama()
    store = apply(model, how)
    for _ in range(2):
        seen = run(model)
        assert torch.allclose(seen.loss, plain.loss, rtol=1e-6)
        for name, grad in seen.grads.items():
            other = plain.grads[name]
            assert grad is not None and other is not None
            assert torch.allclose(grad, other, rtol=1e-4, atol=1e-7), name
    if store is not None:
        assert store.usage.host_bytes > 0, "nothing went to the host"
        assert sorted(store.free_slots) == list(range(len(layers_of(model)[:: how.every])))


def sharded_job(folder: Path, setup: Setup, how: How, steps: list) -> Trajectory:
    """Trains with checkpointing applied before `fully_shard`, as a run does."""
    import ranks.sharded

    shard_model, stores = ranks.sharded.shard_model, []

    def preparing(model: nn.Module, stage: int, mesh: Any) -> Any:
        # rows x longest sample x hidden size of the test's Llama
        stores.append(apply(model, how, slot_bytes=16 * 12 * 9 * 4))
        return shard_model(model, stage, mesh)

    ranks.sharded.shard_model = preparing  # type: ignore[assignment]
    try:
        engine = build(folder, setup)
    finally:
        ranks.sharded.shard_model = shard_model  # type: ignore[assignment]
    results = [take_step(engine, rows, setup.accumulation) for rows in steps]
    weights = whole_weights(engine)
    engine.optimizer.close()
    assert (stores[0] is not None) == how.on_host
    if stores[0] is not None:
        assert stores[0].usage.host_bytes > 0 and len(stores[0].free_slots) == stores[0]._num_slots
    return Trajectory([r.loss for r in results], [r.grad_norm for r in results], weights)


@pytest.mark.parametrize(
    ("stage", "freeze", "world"),
    [(3, "none", 2), (3, "start", 2), (2, "parts", 2), (0, "none", 2), (3, "layer", 1), (2, "start", 1)],
)
def test_sharded_training_keeps_its_bits(stage: int, freeze: str, world: int, tmp_path: Path) -> None:
    folder = save_odd_llama(tmp_path / "llama", True)
    steps = make_steps(2, VOCAB)
    schedule = "deferred" if freeze == "none" else "speculative"
    setup = Setup(stage=stage, freeze=FREEZE[freeze], accumulation=2 if stage == 2 else 1, schedule=schedule)
    plain = run_on_ranks(world, sharded_job, folder, setup, How(0), steps)[0]
    for how in (How(1), How(2), How(1, True), How(1, on_host=True), How(1, True, on_host=True)):
        ours = run_on_ranks(world, sharded_job, folder, setup, how, steps)[0]
        assert ours.losses == plain.losses and ours.norms == plain.norms, how
        for name, weight in plain.weights.items():
            assert torch.equal(ours.weights[name], weight), (how, name)


def test_recipe_keys() -> None:
    def config(**keys: Any) -> TrainConfig:
        return TrainConfig(output_dir="runs/x", **keys)

    assert not config().recomputes_everything
    for value in (True, "full"):
        assert config(gradient_checkpointing=value).recomputes_everything
        assert not config(gradient_checkpointing=value, checkpoint_every=2).recomputes_everything
    assert not config(gradient_checkpointing="selective", cpu_checkpointing=True).recomputes_everything
    for keys in ({"cpu_checkpointing": True}, {"checkpoint_every": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(keys))} .* set gradient_checkpointing to true"):
            config(**keys)
    for wrong in ({"gradient_checkpointing": "some"}, {"checkpoint_every": 0}, {"loss_chunk_tokens": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            config(**wrong)
