"""Forwards that are not one per step: autocast, compiled layers, several losses, other methods, exceptions."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_api.models import make_branches, make_llama, micro_batches
from parity_api.plain import plain_curve
from parity_api.runs import Case, ds_config, masters, train, whole
from parity_api.small import message_of, rows
from ranks.llamas import llama_config
from ranks.pool import run_on_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import heavylift
from heavylift.api.partition import ZeroParamStatus


def variants_job() -> dict[str, Any]:
    """Runs that should not differ from a plain loop, or from each other."""
    results: dict[str, Any] = {}
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    engine, *_ = heavylift.initialize(
        model=make_branches(), config=ds_config(Case("branches", 3, "cpu"), 2, **autocast)
    )
    results["autocast"] = train(engine, "branches", "fp32", 1)
    engine.destroy()
    for compiles in (False, True):
        engine, *_ = heavylift.initialize(model=make_llama(), config=ds_config(Case("llama", 3, "cpu"), 2))
        if compiles:
            engine.compile(backend="eager")
        results[f"compiled {compiles}"] = train(engine, "llama", "fp32", 1)
        engine.destroy()

    config = ds_config(Case("branches", 3, "cpu"), 2)
    engine, *_ = heavylift.initialize(model=make_branches(), config=config)
    engine.backward(engine(*rows(8))["loss"])
    results["message"] = message_of(lambda: engine.backward(engine(*rows(8))["loss"]))
    engine.destroy()
    config["managed_gradient_accumulation"] = False
    for together in (False, True):
        engine, *_ = heavylift.initialize(model=make_branches(), config=config)
        x, y = rows(8)
        if together:
            engine.backward(engine(x, y)["loss"] + engine(-x, y)["loss"])
        else:
            engine.backward(engine(x, y)["loss"])
            engine.backward(engine(-x, y)["loss"])
        engine.step()
        results[f"together {together}"] = masters(engine)
        engine.destroy()
    return results


def test_autocast_compiled_layers_and_several_losses() -> None:
    results = run_on_ranks(2, variants_job)[0]
    losses, model = [], make_branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)
    for batches in micro_batches("branches", 2, torch.float32):
        total = 0.0
        for batch in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(**batch)["loss"] / 2
            loss.backward()
            total += loss.item()
        losses.append(total)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
    assert results["autocast"].losses == pytest.approx(losses, rel=1e-5)
    assert results["autocast"].losses[0] != plain_curve("branches", "fp32", 2, 1).losses[0]
    assert results["compiled True"].losses == results["compiled False"].losses
    assert results["message"].startswith("backward: a second gradient in the same step")
    apart, together = results["together False"], results["together True"]
    assert all(torch.allclose(apart[n], together[n], atol=1e-7) for n in together)
    assert not torch.equal(together["left.weight"], dict(make_branches().named_parameters())["left.weight"])


def compiled_before_job() -> dict[str, Any]:
    """Layers that their owner compiled whole, hooks and all, as the 70B program does on a GPU."""
    results: dict[str, Any] = {}
    for compiles in (False, True):
        model = make_llama()
        if compiles:
            for layer in model.model.layers:
                layer.compile(backend="eager", fullgraph=True)
        profiled = {"flops_profiler": {"enabled": True, "profile_step": 2}, "wall_clock_breakdown": True}
        config = ds_config(Case("llama", 3, "cpu"), dist.get_world_size(), **profiled)
        engine, *_ = heavylift.initialize(model=model, config=config)
        results[f"compiled {compiles}"] = train(engine, "llama", "fp32", 1)
        foreign = nn.Linear(5, 1)(torch.ones(5)).sum()
        results["foreign"] = message_of(partial(engine.backward, foreign))
        engine.destroy()
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_compiled_whole_before_initialize(ranks: int) -> None:
    results = run_on_ranks(ranks, compiled_before_job)[0]
    assert results["compiled True"].losses == results["compiled False"].losses
    assert "depends on no trained parameter" in results["foreign"]


class Methods(nn.Module):
    """Uses its parameters in other methods than forward too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 1)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x))

    def loss_of(self, x: torch.Tensor) -> torch.Tensor:
        return self(self.encode(x)).square().mean()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.second(hidden)

    @torch.no_grad()
    def clip(self) -> None:
        for param in self.parameters():
            param.clamp_(-0.1, 0.1)

    @torch.no_grad()
    def shift(self, by: torch.Tensor) -> None:
        self.first.weight.add_(by)


TORCH_RECOVERS = hasattr(FSDPModule, "reset_iter_state")
"""Whether FSDP2 can go on after an exception in a forward (torch 2.13)."""


def methods_job(calls: tuple[str, ...]) -> dict[str, Any]:
    torch.manual_seed(6)
    engine, *_ = heavylift.initialize(model=Methods(), config=ds_config(Case("", 3, "cpu"), dist.get_world_size()))
    for step in range(4):
        x = rows(8)[0]
        # one method that uses all, or a method and forward one after the other
        one = calls[step % len(calls)] == "one"
        engine.backward(engine.loss_of(x) if one else engine(engine.encode(x)).square().mean())
        engine.step()
    trained = masters(engine)
    message = message_of(lambda: engine.shift(torch.ones(()))) if TORCH_RECOVERS else ""
    engine.clip()
    clipped = {n: whole(p) for n, p in engine.module.named_parameters()}
    engine.backward(engine.loss_of(rows(8)[0]))
    engine.step()
    after = masters(engine)
    engine.destroy()
    return {"trained": trained, "message": message, "clipped": clipped, "after": after}


@pytest.mark.parametrize("calls", [("one",), ("two",), ("two", "one")], ids=["one", "two", "both"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_methods_that_use_parameters_outside_of_forward(world_size: int, calls: tuple[str, ...]) -> None:
    result = run_on_ranks(world_size, methods_job, calls)[0]
    torch.manual_seed(6)
    model = Methods()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)
    for _ in range(4):
        for rank in range(world_size):
            x = torch.randn(8, 5, generator=torch.Generator().manual_seed(rank))
            (model.loss_of(x) / world_size).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        assert torch.allclose(result["trained"][name], param, atol=1e-6), name
        assert torch.equal(result["clipped"][name], result["trained"][name].clamp(-0.1, 0.1)), name
        # the masters follow what the script wrote: one more step away from there, not from the unclipped weights
        assert 0 < float((result["after"][name] - result["clipped"][name]).abs().max()) < 0.02, name
    if TORCH_RECOVERS:
        assert "Methods.shift: it writes into first.weight, which are gathered copies" in result["message"]
        assert "call engine.module.shift()" in result["message"]


def failures_job() -> dict[str, Any]:
    """Exceptions inside of forward and backward, caught by the script."""
    results: dict[str, Any] = {}
    for name in ("undisturbed", "disturbed") if TORCH_RECOVERS else ():
        engine, *_ = heavylift.initialize(model=make_branches(), config=ds_config(Case("", 2, "cpu", "fp32", 2), 2))
        for _ in range(2):
            for micro in range(2):
                engine.backward(engine(*rows(4))["loss"])
                if name == "disturbed":
                    with pytest.raises(RuntimeError):
                        engine(torch.ones(4, 3), torch.ones(4, 1))
                engine.step()
                assert engine.global_steps == (engine.micro_steps // 2), micro
        results[name] = masters(engine)
        engine.destroy()

    engine, *_ = heavylift.initialize(model=make_branches(), config=ds_config(Case("", 0, "none", "fp32", 2), 2))
    engine.backward(engine(*rows(4))["loss"])
    with pytest.raises(RuntimeError):
        engine(torch.ones(4, 3), torch.ones(4, 1))
    results["forward"] = message_of(engine.step)
    engine.destroy()

    engine, *_ = heavylift.initialize(model=make_branches(), config=ds_config(Case("", 3, "cpu"), 2))
    loss = engine(*rows(4))["loss"]
    loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    results["backward"] = message_of(lambda: engine(*rows(4)))
    engine.destroy()
    return results


def test_an_exception_that_a_script_catches_leaves_nothing_stale() -> None:
    results = run_on_ranks(2, failures_job)[0]
    if TORCH_RECOVERS:
        undisturbed, disturbed = results["undisturbed"], results["disturbed"]
        assert all(torch.equal(undisturbed[n], disturbed[n]) for n in undisturbed)
        assert not torch.equal(undisturbed["inside.weight"], dict(make_branches().named_parameters())["inside.weight"])
    assert "cannot go on after an exception in forward, with RuntimeError" in results["forward"]
    assert "cannot go on after an exception in backward, with ZeroDivisionError" in results["backward"]


def preference_batches(rank: int) -> list[torch.Tensor]:
    """Two batches of tokens that one loss compares, as preference training does."""
    generator = torch.Generator().manual_seed(30 + rank)
    return list(torch.randint(0, 61, (2, 4, 6), generator=generator))


def preference_loss(model: Any, rank: int) -> torch.Tensor:
    chosen, rejected = (model(input_ids=ids, labels=ids).loss for ids in preference_batches(rank))
    return nn.functional.softplus(chosen - rejected)


def preference_job(case: Case) -> dict[str, torch.Tensor]:
    """Two forwards before one backward: every layer is gathered twice."""
    engine, *_ = heavylift.initialize(model=make_llama(), config=ds_config(case, 2))
    for _ in range(3):
        engine.backward(preference_loss(engine, dist.get_rank()))
        engine.step()
    weights = masters(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("case", [Case("", 3, "cpu"), Case("", 3, "none"), Case("", 1, "none")])
def test_two_forwards_before_one_backward(case: Case) -> None:
    weights = run_on_ranks(2, preference_job, case)[0]
    model = make_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)
    for _ in range(3):
        for rank in range(2):
            (preference_loss(model, rank) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        off = (weights[name] - param.detach()).abs()
        # a gradient near 0 may have the other sign in another order of sums
        assert float(off.mean()) < 1e-5 and float(off.max()) < 2e-3, name


class Parts(nn.Module):
    """Called as a whole, or part by part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def all_parts(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Two parts one after the other, one of them twice, the first with inputs that have a gradient."""
    code = model.encoder(x.clone().requires_grad_())
    return (model.head(code) + model.head(torch.tanh(code))).square().mean()


def looked_at_before(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A part without gradients, which leaves it gathered, then with them, and a `forward` that goes past hooks."""
    with torch.no_grad():
        code = model.encoder(x)
    return (model.head(code) - model.forward(x)).square().mean()


PART_LOSSES = {"all parts": all_parts, "looked at before": looked_at_before}


def parts_job(stage: int, offload: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, loss_of in PART_LOSSES.items():
        engine, *_ = heavylift.initialize(model=Parts(), config=ds_config(Case("", stage, offload, "fp32"), 2))
        for _ in range(3):
            engine.backward(loss_of(engine.module, rows(8)[0]))
            engine.step()
        with torch.no_grad():
            code = engine.module.encoder(rows(8)[0])
            results[f"{name}, read"] = (code, engine(rows(8)[0]), engine.module.head(code))
        results[name] = masters(engine)
        engine.destroy()
    return results


@pytest.mark.parametrize(("stage", "offload", "ranks"), [(0, "none", 2), (1, "cpu", 2), (3, "cpu", 2), (3, "cpu", 1)])
def test_parts_that_are_called_without_the_whole(stage: int, offload: str, ranks: int) -> None:
    """What `generate` does with an encoder, and what scripts do: values and gradients are those of plain modules."""
    results = run_on_ranks(ranks, parts_job, stage, offload)[0]
    for name, loss_of in PART_LOSSES.items():
        model = Parts()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)
        for _ in range(3):
            for rank in range(ranks):
                x = torch.randn(8, 5, generator=torch.Generator().manual_seed(rank))
                (loss_of(model, x) / ranks).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
            optimizer.step()
            optimizer.zero_grad()
        for key, weight in model.named_parameters():
            assert torch.allclose(results[name][key].view_as(weight), weight, atol=1e-6), (name, key)
        _, whole_output, from_parts = results[f"{name}, read"]
        assert torch.equal(whole_output, from_parts)


class Around(nn.Module):
    """Another module around a model, as PEFT's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs).logits


def generating_job() -> list[tuple[str, list[Any]]]:
    """An encoder-decoder whose encoder `generate` calls by itself, and a model inside of another module."""
    from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2}
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=31, decoder_start_token_id=0, **sizes))
    inner = make_llama()
    assert isinstance(inner, LlamaForCausalLM)
    wrapped = Around(inner)
    ids = torch.arange(3, 9)[None]
    results = []
    for model, generates in ((t5, lambda m: m), (wrapped, lambda m: m.inner)):

        def tokens(model: Any = model, generates: Any = generates) -> list[Any]:
            generates(model).eval()
            found = generates(model).generate(input_ids=ids, max_new_tokens=6, do_sample=False)
            return found.tolist()

        plain = tokens()
        engine, *_ = heavylift.initialize(model=model, config=ds_config(Case("", 3, "cpu", "fp32"), 2))
        results.append((plain, tokens()))
        engine.destroy()
    return results


def test_generation_by_a_module_inside_of_the_engines() -> None:
    for plain, sharded in run_on_ranks(2, generating_job)[0]:
        assert plain == sharded


def fused_forward(self: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """As libraries replace a language model's forward: the head's weight is read, and the head not called. They are
    ready for FSDP2, and take `full_tensor()` of a shard, through which no gradients are added up."""
    states = self.model(input_ids=input_ids).last_hidden_state
    weight = self.lm_head.weight
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    logits = (states @ weight.T)[:, :-1]
    return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())}


def untied_llama() -> nn.Module:
    from transformers import LlamaForCausalLM

    torch.manual_seed(4)
    return LlamaForCausalLM(llama_config(61, 18, 21, 2, 3, 1, tied=False, head_dim=6, initializer_range=0.2))


def fused_job(stage: int, of_the_class: bool) -> dict[bool, dict[str, torch.Tensor]]:
    """Weights after three steps, with the model's own forward (False) and with the fused one."""
    weights = {}
    for fused in (False, True):
        model = untied_llama()
        kind: Any = type(model)
        own = kind.forward
        if fused and of_the_class:
            kind.forward = fused_forward
        elif fused:
            model.forward = MethodType(fused_forward, model)
        try:
            engine, *_ = heavylift.initialize(model=model, config=ds_config(Case("llama", stage, "cpu", "fp32"), 2))
            for step in range(3):
                ids = torch.randint(1, 60, (2, 8), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
                engine.backward(engine(input_ids=ids, labels=ids)["loss"])
                engine.step()
            weights[fused] = masters(engine)
            engine.destroy()
        finally:
            kind.forward = own
    return weights


@pytest.mark.parametrize(("stage", "of_the_class"), [(2, False), (3, True)])
def test_a_forward_that_reads_the_heads_weight(stage: int, of_the_class: bool) -> None:
    weights = run_on_ranks(2, fused_job, stage, of_the_class)[0]
    for name, weight in weights[False].items():
        assert torch.allclose(weight, weights[True][name], atol=1e-6), name


def hooks_job() -> dict[str, Any]:
    """What TRL does around generation, and the marks that it reads in a forward."""
    results: dict[str, Any] = {"status": []}
    plain = untied_llama().eval()
    ids = torch.arange(3, 9)[None]
    results["plain"] = plain.generate(input_ids=ids, max_new_tokens=6, do_sample=False).tolist()
    model = untied_llama()
    engine, optimizer, *_ = heavylift.initialize(model=model, config=ds_config(Case("llama", 3, "cpu", "fp32"), 2))
    weight = model.model.norm.weight
    results["status"].append((weight.ds_status, tuple(weight.ds_shape)))
    look = model.model.norm.register_forward_pre_hook(
        lambda module, _: results["status"].append((module.weight.ds_status, tuple(module.weight.ds_shape)))
    )
    with heavylift.zero.GatheredParameters(engine.parameters()):
        hooks = optimizer.parameter_offload
        for _, param in (*hooks.module.named_parameters(), *hooks.module.ds_external_parameters()):
            param.ds_active_sub_modules.clear()
        for hook in (*hooks.forward_hooks, *hooks.backward_hooks):
            hook.remove()
        results["generated"] = model.eval().generate(input_ids=ids, max_new_tokens=6, do_sample=False).tolist()
        hooks._register_deepspeed_module(hooks.module)
    look.remove()
    model.train()
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    results["stepped"] = engine.was_step_applied()
    engine.destroy()
    return results


def test_generation_between_gathered_parameters_as_trl_does() -> None:
    results = run_on_ranks(2, hooks_job)[0]
    assert results["generated"] == results["plain"] and results["stepped"]
    before, *inside = results["status"]
    assert before == (ZeroParamStatus.NOT_AVAILABLE, (18,))
    assert len(inside) == 6 and set(inside) == {(ZeroParamStatus.AVAILABLE, (18,))}
