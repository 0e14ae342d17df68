"""The loss in chunks equals the plain one: values, gradients, on ranks; and whole logits never exist.

Tolerances are about ten times what was seen (in brackets): float32 sums in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks.models import VOCAB, save_odd_llama
from ranks.plain import Trajectory, make_steps, plain_train
from ranks.pool import run_on_ranks
from ranks.sharded import Setup, build, param_groups, take_step, whole_weights
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heavylift.engine import sum_token_losses
from heavylift.errors import UserError
from heavylift.models.chunked_loss import Targets, chunked_cross_entropy
from heavylift.models.loss_head import LossHead, auto_chunk_tokens, find_loss_head, install_loss_head

CPU = torch.device("cpu")
STEPS = make_steps(3, VOCAB)


def random_case(dtype: torch.dtype, trained: float = 0.5, vocab: int = 301) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [3, 37, 24], weight [vocab, 24], labels [3, 37] of which a share is trained."""
    generator = torch.Generator().manual_seed(int(10 * trained))
    hidden = torch.randn(3, 37, 24, generator=generator).to(dtype).requires_grad_()
    weight = (0.5 * torch.randn(vocab, 24, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (3, 37), generator=generator)
    return hidden, weight, labels.where(torch.rand(3, 37, generator=generator) < trained, -100)


def gradients(loss: Tensor, *inputs: Tensor, scale: float = 1.0) -> list[Tensor]:
    return list(torch.autograd.grad(loss * scale, inputs))


def relative(a: Tensor, truth: Tensor) -> float:
    return float((a.double() - truth.double()).norm() / truth.double().norm())


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 10_000])
def test_float32_equals_the_plain_loss(chunk_tokens: int) -> None:
    hidden, weight, labels = random_case(torch.float32)
    loss = chunked_cross_entropy(hidden, weight, Targets.of(labels, CPU), chunk_tokens)
    plain = sum_token_losses(F.linear(hidden, weight), labels)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)  # (7e-8)
    pairs = zip(gradients(loss, hidden, weight, scale=0.01), gradients(plain, hidden, weight, scale=0.01), strict=True)
    for ours, theirs in pairs:
        assert relative(ours, theirs) < 2e-6  # (2e-7)


@pytest.mark.parametrize("chunk_tokens", [7, 64])
def test_bfloat16_is_as_close_to_the_truth_as_the_plain_loss(chunk_tokens: int) -> None:
    hidden, weight, labels = random_case(torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = F.cross_entropy(F.linear(*wide).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    ours = chunked_cross_entropy(hidden, weight, Targets.of(labels, CPU), chunk_tokens)
    plain = sum_token_losses(F.linear(hidden, weight), labels)
    assert abs(ours.item() - truth.item()) <= abs(plain.item() - truth.item()) + 1e-6 * truth.item()
    for true, our, their in zip(
        gradients(truth, *wide), gradients(ours, hidden, weight), gradients(plain, hidden, weight), strict=True
    ):
        assert our.dtype == torch.bfloat16
        assert relative(our, true) <= relative(their, true)
        assert relative(our, true) < 2e-3  # one rounding to 8 bits: at most 2^-9 each


def test_no_trained_token_gives_zero_and_zero_gradients() -> None:
    hidden, weight, labels = random_case(torch.float32)
    loss = chunked_cross_entropy(hidden, weight, Targets.of(torch.full_like(labels, -100), CPU), 8)
    assert loss.item() == 0.0
    for grad, of in zip(gradients(loss, hidden, weight), (hidden, weight), strict=True):
        assert grad.shape == of.shape and not grad.any()


def test_frozen_inputs_get_no_gradient() -> None:
    hidden, weight, labels = random_case(torch.float32)
    targets = Targets.of(labels, CPU)
    both = gradients(chunked_cross_entropy(hidden, weight, targets, 8), hidden, weight)
    frozen_head = chunked_cross_entropy(hidden, weight.detach(), targets, 8)
    frozen_body = chunked_cross_entropy(hidden.detach(), weight, targets, 8)
    assert torch.equal(gradients(frozen_head, hidden)[0], both[0])
    assert torch.equal(gradients(frozen_body, weight)[0], both[1])
    assert not chunked_cross_entropy(hidden.detach(), weight.detach(), targets, 8).requires_grad


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, labels = random_case(torch.float32)
    with torch.no_grad():
        weight *= 1e4
    loss = chunked_cross_entropy(hidden, weight, Targets.of(labels, CPU), 16)
    plain = sum_token_losses(F.linear(hidden, weight), labels)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    assert all(grad.isfinite().all() for grad in gradients(loss, hidden, weight))


class Largest(TorchDispatchMode):
    """Sees every tensor that an operator returns: the most elements, and the rows of every matmul's result."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.matmul_rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
                if func is torch.ops.aten.mm.default:
                    self.matmul_rows.append(leaf.shape[0])
        return result


def largest_numel(loss_of: Any, *inputs: Tensor) -> Largest:
    with Largest() as seen:
        torch.autograd.grad(loss_of(), inputs)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_chunk_of_logits_or_the_weight(dtype: torch.dtype) -> None:
    hidden, weight, labels = random_case(dtype, vocab=5003)
    chunk_tokens = 16
    allowed = max(chunk_tokens * 5003, weight.numel(), hidden.numel())
    ours = largest_numel(
        lambda: chunked_cross_entropy(hidden, weight, Targets.of(labels, CPU), chunk_tokens), hidden, weight
    )
    plain = largest_numel(lambda: sum_token_losses(F.linear(hidden, weight), labels), hidden, weight)
    assert ours.numel <= allowed
    assert plain.numel == 3 * 37 * 5003 > 3 * allowed, "the plain loss would not have passed"


def test_tokens_without_label_are_not_computed() -> None:
    hidden, weight, labels = random_case(torch.float32, trained=0.1)
    num_trained = int((labels != -100).sum())
    assert 0 < num_trained < 30
    with torch.no_grad(), Largest() as seen:
        chunked_cross_entropy(hidden, weight, Targets.of(labels, CPU), 8)
    assert sum(seen.matmul_rows) == num_trained


def test_auto_chunk_takes_256_mib_in_whole_tiles() -> None:
    for vocab in (32_000, 49_152, 128_256, 262_208):
        tokens = auto_chunk_tokens(vocab)
        assert tokens % 128 == 0
        assert 0.95 * 2**28 < tokens * vocab * 4 < 1.05 * 2**28
    assert auto_chunk_tokens(10**7) == 128


def tiny(model_type: str, **changes: Any) -> nn.Module:
    """A model of two tiny layers of a family, random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    config = AutoConfig.for_model(model_type, **{**sizes, "num_key_value_heads": 2, "head_dim": 8, **changes})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def test_model_keeps_its_names_its_ties_and_its_logits() -> None:
    for tied in (False, True):
        model = tiny("llama", tie_word_embeddings=tied)
        ids = torch.arange(12).view(2, 6)
        names, logits = list(model.state_dict()), model(input_ids=ids).logits
        head, weight = model.get_output_embeddings(), model.get_output_embeddings().weight
        assert install_loss_head(model, 4) is None
        assert model.get_output_embeddings() is head is find_loss_head(model)
        assert head.weight is weight and (weight is model.get_input_embeddings().weight) == tied
        assert list(model.state_dict()) == names
        assert torch.equal(model(input_ids=ids).logits, logits), "without targets it is the plain head"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
def test_whole_model_has_the_loss_and_gradients_of_its_plain_twin(family: str, tied: bool) -> None:
    more = {"final_logit_softcapping": None} if family == "gemma2" else {}
    if family == "qwen3_moe":
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
    model = tiny(family, tie_word_embeddings=tied, **more)
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1).where(torch.arange(9) % 3 > 0, -100)
    sum_token_losses(model(input_ids=ids, use_cache=False).logits, labels).backward()
    plain = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    assert install_loss_head(model, 4) is None
    head = find_loss_head(model)
    assert head is not None
    head.loss_sum(model, ids, Targets.of(labels, CPU)).backward()
    for name, param in model.named_parameters():
        theirs = plain[name]
        assert (param.grad is None) == (theirs is None), name
        if theirs is not None and param.grad is not None and theirs.any():
            assert relative(param.grad, theirs) < 1e-5, name  # (3e-7)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma2", {"final_logit_softcapping": 30.0}, "changes its logits"),
        ("cohere", {"logit_scale": 0.0625}, "changes its logits"),
        ("granite", {"logits_scaling": 8.0}, "changes its logits"),
        ("phi", {}, "head with a bias"),
    ],
)
def test_models_that_need_whole_logits_keep_them(family: str, changes: dict[str, Any], reason: str) -> None:
    model = tiny(family, **changes)
    assert reason in str(install_loss_head(model, "auto"))
    assert find_loss_head(model) is None
    assert type(model.get_output_embeddings()) is nn.Linear
    assert "forward" not in vars(model.base_model), "the stand-in is gone"
    with pytest.raises(UserError, match=rf"train.loss_chunk_tokens: .*{reason}.*set it to auto or 0"):
        install_loss_head(model, 128)
    assert install_loss_head(model, 0) is None


def test_logits_changed_in_place_or_never_computed_are_found() -> None:
    class InPlace(type(tiny("llama"))):  # type: ignore[misc]
        def forward(self, **kwargs: Any) -> Any:
            output = super().forward(**kwargs)
            output.logits.mul_(0.5)
            return output

    class Other(InPlace):
        def forward(self, **kwargs: Any) -> Any:
            return self.model(**kwargs)

    for kind, reason in ((InPlace, "changes its logits"), (Other, "does not call its head")):
        model = tiny("llama")
        model.__class__ = kind
        assert reason in str(install_loss_head(model, "auto"))


def test_the_meta_device_is_enough() -> None:
    with torch.device("meta"):
        model = tiny("llama")
        assert install_loss_head(model, "auto") is None
    assert isinstance(model.get_output_embeddings(), LossHead)


@dataclass(frozen=True)
class Chunked:
    """What the ranks run: a setup, and the chunk size (0: whole logits)."""

    setup: Setup
    chunk_tokens: int


def chunked_job(folder: Path, case: Chunked, steps: list) -> dict[str, Any]:
    """What a training does, with the head installed before `fully_shard` as in a run; evaluations before and after."""
    import ranks.sharded

    shard_model, reasons = ranks.sharded.shard_model, []

    def installing(model: nn.Module, stage: int, mesh: Any) -> Any:
        reasons.append(install_loss_head(model, case.chunk_tokens))
        return shard_model(model, stage, mesh)

    ranks.sharded.shard_model = installing  # type: ignore[assignment]
    try:
        engine = build(folder, case.setup)
    finally:
        ranks.sharded.shard_model = shard_model  # type: ignore[assignment]
    assert reasons == [None]
    assert (find_loss_head(engine.module) is not None) == (case.chunk_tokens > 0)
    evaluated = [engine.evaluate([steps[0]], steps[0].num_trained)]
    results = [take_step(engine, rows, case.setup.accumulation) for rows in steps]
    evaluated.append(engine.evaluate([steps[0]], steps[0].num_trained))
    weights = whole_weights(engine)
    engine.optimizer.close()
    return {
        "run": Trajectory([r.loss for r in results], [r.grad_norm for r in results], weights),
        "evaluated": evaluated,
    }


SETUPS = {
    "stage_3_host_deferred": Setup(stage=3, schedule="deferred", clip=0.05),
    "stage_3_speculative": Setup(stage=3, schedule="speculative"),
    "stage_2_accumulated": Setup(stage=2, accumulation=4),
    "stage_0": Setup(stage=0, tier="device"),
    "frozen_head": Setup(stage=3, freeze=("lm_head.*", "model.embed_tokens.*")),
}


@pytest.mark.parametrize(("world", "tied"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("name", SETUPS)
def test_training_follows_the_plain_twin(name: str, tied: bool, world: int, tmp_path: Path) -> None:
    """Micro-batches without trained tokens, on whole ranks too, are among the steps."""
    setup = SETUPS[name]
    if name == "frozen_head" and tied:
        setup = Setup(stage=3, freeze=("model.embed_tokens.*",))
    folder = save_odd_llama(tmp_path / "llama", tied)
    ours = run_on_ranks(world, chunked_job, folder, Chunked(setup, 4), STEPS)[0]
    twin = run_on_ranks(world, chunked_job, folder, Chunked(setup, 0), STEPS)[0]
    assert ours["run"].losses == pytest.approx(twin["run"].losses, rel=2e-6)
    assert ours["run"].norms == pytest.approx(twin["run"].norms, rel=1e-5)
    assert ours["evaluated"] == pytest.approx(twin["evaluated"], rel=2e-6)
    assert ours["evaluated"][1] != ours["evaluated"][0]
    for weight, value in twin["run"].weights.items():
        assert float((ours["run"].weights[weight] - value).abs().max()) < 2e-3 * setup.lr, weight


def test_training_follows_a_plain_loop(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    setup = Setup(stage=3, accumulation=2)
    folder = save_odd_llama(tmp_path / "llama", False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    plain = plain_train(model, param_groups(model, setup), STEPS, setup.lr, setup.clip)
    ours = run_on_ranks(2, chunked_job, folder, Chunked(setup, 3), STEPS)[0]["run"]
    assert ours.losses == pytest.approx(plain.losses, rel=2e-6)
    assert ours.norms == pytest.approx(plain.norms, rel=1e-5)
