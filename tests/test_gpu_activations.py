"""Loss in chunks and activation checkpointing on a GPU: right, and as small as the formulas say. `pytest -m gpu`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heavylift.engine import sum_token_losses
from heavylift.memory.boundaries import BoundaryStore
from heavylift.memory.checkpointing import checkpoint_layers
from heavylift.models.chunked_loss import Targets, _accumulates_wider, chunked_cross_entropy
from heavylift.models.loss_head import find_loss_head, install_loss_head
from heavylift.sharding import layers_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = torch.device("cuda")
BATCH, SEQ, HIDDEN, VOCAB, NUM_LAYERS = 2, 512, 512, 32_000, 12
BOUNDARY_BYTES = BATCH * SEQ * HIDDEN * 2


def relative(a: Tensor, truth: Tensor) -> float:
    return float((a.double() - truth.double()).norm() / truth.double().norm())


def head_case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [2, 512, 512], weight [32000, 512], labels of which about half are trained (on the CPU)."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(BATCH, SEQ, HIDDEN, generator=generator).to(GPU, dtype).requires_grad_()
    weight = (0.05 * torch.randn(VOCAB, HIDDEN, generator=generator)).to(GPU, dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
    return hidden, weight, labels.where(torch.rand(BATCH, SEQ, generator=generator) < 0.5, -100)


def peak_bytes(action: Callable[[], object]) -> int:
    """Most bytes beyond those allocated now while `action` runs."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_in_chunks_is_as_close_to_the_truth_as_the_plain_one(dtype: torch.dtype) -> None:
    hidden, weight, labels = head_case(dtype)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    on_gpu = labels.to(GPU)
    truth = F.cross_entropy(F.linear(*wide).flatten(0, 1), on_gpu.flatten(), ignore_index=-100, reduction="sum")
    plain = sum_token_losses(F.linear(hidden, weight), on_gpu)
    ours = chunked_cross_entropy(hidden, weight, Targets.of(labels, GPU), 128)
    slack = 1e-6 * truth.item()
    assert abs(ours.item() - truth.item()) <= abs(plain.item() - truth.item()) + slack
    true_grads = torch.autograd.grad(truth, wide)
    for true, our, their in zip(
        true_grads,
        torch.autograd.grad(ours, (hidden, weight)),
        torch.autograd.grad(plain, (hidden, weight)),
        strict=True,
    ):
        # float32 sums of another order; bfloat16: the plain gradient is also rounded once at its end
        assert relative(our, true) <= relative(their, true) * 1.05 + 1e-6
        assert relative(our, true) < (1e-5 if dtype == torch.float32 else 4e-3)


def test_peak_of_the_loss_is_that_of_the_formula() -> None:
    hidden, weight, labels = head_case(torch.bfloat16)
    targets, chunk_tokens, num_trained = Targets.of(labels, GPU), 64, int((labels != -100).sum())
    assert _accumulates_wider(GPU, torch.bfloat16) in (True, False)  # its own small tensors, once
    # warm-up: workspaces of the matmul library
    torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets, chunk_tokens), (hidden, weight))
    peak = peak_bytes(
        lambda: torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets, chunk_tokens), (hidden, weight))
    )
    # float32 gradient of the weight and, without addmm into float32, one product; then its rounded copy
    weight_bytes = (4 if _accumulates_wider(GPU, torch.bfloat16) else 8) * VOCAB * HIDDEN
    # logits, log-probabilities and the rounded gradient of a chunk
    chunk_bytes = (4 + 4 + 2) * chunk_tokens * VOCAB
    rows_bytes = (4 + 4 + 2) * num_trained * HIDDEN + 2 * hidden.numel()
    expected = weight_bytes + max(chunk_bytes, 2 * VOCAB * HIDDEN) + rows_bytes
    assert peak <= 1.05 * expected + 2**21
    whole = peak_bytes(
        lambda: torch.autograd.grad(sum_token_losses(F.linear(hidden, weight), labels.to(GPU)), (hidden, weight))
    )
    assert whole >= 2 * 4 * labels.numel() * VOCAB, "the plain twin holds whole logits and their gradient"
    assert peak < 0.75 * whole


def llama(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(GPU, dtype).train()


@dataclass(frozen=True)
class How:
    """How layers are checkpointed; `every` 0: not at all."""

    every: int = 1
    selective: bool = False
    on_host: bool = False
    compiled: bool = False


def apply(model: nn.Module, how: How) -> BoundaryStore | None:
    layers = layers_of(model)
    chosen = checkpoint_layers(layers, every=how.every, selective=how.selective) if how.every else []
    if how.compiled:
        for layer in layers:
            layer.compile(fullgraph=True)
    if not how.on_host:
        return None
    store = BoundaryStore(len(chosen), BOUNDARY_BYTES, GPU)
    for layer in chosen:
        store.attach(layer)
    return store


@dataclass
class Seen:
    """Three steps of plain SGD, and what a forward leaves allocated."""

    losses: list[float]
    grads: list[Tensor]
    kept_bytes: int


def run(how: How) -> Seen:
    torch._dynamo.reset()
    model = llama()
    assert install_loss_head(model, "auto") is None
    store = apply(model, how)
    head = find_loss_head(model)
    assert head is not None
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    targets = Targets.of(ids.roll(-1, 1), GPU)
    losses, grads, kept = [], [], 0
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        # the body alone: the head's own tensors are measured elsewhere
        hidden = model.model(input_ids=ids.to(GPU), use_cache=False).last_hidden_state
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        loss = chunked_cross_entropy(hidden, head.weight, targets, head.chunk_tokens)
        del hidden
        (loss / ids.numel()).backward()
        losses.append(loss.item())
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
        grads = [p.grad.clone() for p in model.parameters()]
        if store is not None:
            assert sorted(store.free_slots) == list(range(len(layers_of(model)[:: how.every])))
    if store is not None:
        assert store.usage.pinned_bytes == store.usage.host_bytes <= 1.05 * store.num_bytes + 4096
    return Seen(losses, grads, kept)


def test_eager_checkpointing_keeps_bits_and_less_memory() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # backward of attention and embedding
    try:
        runs = {
            name: run(how)
            for name, how in {
                "none": How(0),
                "every_2": How(2),
                "full": How(1),
                "selective": How(1, selective=True),
                "full_host": How(1, on_host=True),
                "selective_host": How(1, selective=True, on_host=True),
            }.items()
        }
    finally:
        torch.use_deterministic_algorithms(False)
    for name, seen in runs.items():
        assert seen.losses == runs["none"].losses, name
        assert all(torch.equal(a, b) for a, b in zip(seen.grads, runs["none"].grads, strict=True)), name
    kept = {name: seen.kept_bytes for name, seen in runs.items()}
    assert kept["none"] > kept["selective"] > kept["full"] > kept["full_host"], kept
    assert kept["none"] > kept["every_2"] > kept["full"], kept
    # inputs of all layers; of the final norm its input in float32 and more, its output; rotary tables
    assert kept["full"] <= (NUM_LAYERS + 8) * BOUNDARY_BYTES, kept
    # on the host: all but the last, which is still here; the one before is let go when the last begins
    assert kept["full"] - kept["full_host"] >= (NUM_LAYERS - 2) * BOUNDARY_BYTES, kept
    assert kept["selective"] - kept["selective_host"] >= (NUM_LAYERS - 2) * BOUNDARY_BYTES, kept


@pytest.mark.parametrize("selective", [False, True])
def test_compiled_layers_with_inputs_on_the_host(selective: bool) -> None:
    on_gpu = run(How(1, selective, compiled=True))
    on_host = run(How(1, selective, on_host=True, compiled=True))
    plain = run(How(0, compiled=True))
    assert on_host.losses == pytest.approx(on_gpu.losses, rel=1e-3)
    assert on_host.losses[0] == on_gpu.losses[0], "the same compiled forward"
    assert on_gpu.losses == pytest.approx(plain.losses, rel=1e-2)
    assert plain.kept_bytes > on_gpu.kept_bytes > on_host.kept_bytes
    assert on_gpu.kept_bytes - on_host.kept_bytes >= (NUM_LAYERS - 2) * BOUNDARY_BYTES


def test_copies_run_beside_the_computation_on_one_side_stream(tmp_path: Path) -> None:
    """Every input goes down and, but for the last, comes up again, on a stream that is not the computing one."""
    from torch.profiler import ProfilerActivity, profile

    model = llama()
    apply(model, How(1, on_host=True))
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), device=GPU)
    model.model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        model.model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
        torch.cuda.synchronize()
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and e["args"]["bytes"] == BOUNDARY_BYTES]
    down = [e for e in copies if "DtoH" in e["name"]]
    up = [e for e in copies if "HtoD" in e["name"]]
    assert (len(down), len(up)) == (NUM_LAYERS, NUM_LAYERS - 1)
    streams = {e["args"]["stream"] for e in [*down, *up]}
    computing = {e["args"]["stream"] for e in events if e.get("cat") == "kernel"}
    assert len(streams) == 1 and computing and not streams & computing
    assert all("Pinned" in e["name"] for e in [*down, *up])
