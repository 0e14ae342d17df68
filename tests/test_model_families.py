"""Models of many families train as the plain loop does, and come out as transformers and the hub know them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.families import FAMILIES, VOCAB, save_family
from ranks.gather import whole
from ranks.plain import Trajectory, make_steps, plain_train
from ranks.pool import run_on_ranks
from ranks.sharded import CPU, Setup, param_groups, take_step, whole_weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from heavylift.checkpoint.huggingface import save_model
from heavylift.config.schema import ModelConfig
from heavylift.engine import Engine, build_optimizer
from heavylift.errors import UserError
from heavylift.models.load import build_on_meta, init_random_weights, load_hf_config, load_weights, materialise
from heavylift.models.loss_head import install_loss_head
from heavylift.models.stored import check_weights, default_layout
from heavylift.offload.options import TieredOptions
from heavylift.sharding import make_mesh, shard_model

STEPS = make_steps(2, VOCAB)
# no decay: with it, the rounding noise that is a key bias's whole gradient would be compared as a step of full size
SETUP = Setup(lr=1e-3, weight_decay=0.0)


def train_job(folder: Path, stage: int, out: Path, dtype: torch.dtype = torch.float32) -> Trajectory:
    """As `heavylift train` does it: checked weights, the loss in the head, the export by the names of the files."""
    hf_config = load_hf_config(folder, False)
    model = build_on_meta(hf_config, ModelConfig(model_name_or_path=str(folder)), dtype)
    stored = check_weights(model, folder)
    install_loss_head(model, "auto")
    sharded = shard_model(model, stage, make_mesh(stage, "cpu"))
    materialise(model, CPU)
    load_weights(model, folder, stored)
    groups = param_groups(model, SETUP)
    optimizer = build_optimizer(sharded, groups, TieredOptions(), lr=SETUP.lr, betas=(0.9, 0.999), eps=1e-8)
    engine = Engine(sharded, optimizer, CPU)
    results = [take_step(engine, rows) for rows in STEPS]
    weights = whole_weights(engine)
    optimizer.close()
    save_model(model, out, hf_config=hf_config, tokenizer=None, dtype="float32", max_shard_bytes=5_000, layout=stored)
    return Trajectory([r.loss for r in results], [r.grad_norm for r in results], weights)


def names_in(folder: Path) -> set[str]:
    names = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    return names


@pytest.mark.parametrize(("family", "stage"), [(name, 3 if i % 3 else 0) for i, name in enumerate(FAMILIES)])
def test_trains_as_the_plain_loop_and_exports_what_it_was(family: str, stage: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, out = save_family(family, tmp_path / "model"), tmp_path / "out"
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    plain = plain_train(model, param_groups(model, SETUP), STEPS, SETUP.lr, clip=0.0)
    ours = run_on_ranks(2, train_job, folder, stage, out)[0]
    assert ours.losses == pytest.approx(plain.losses, rel=2e-6)
    assert ours.norms == pytest.approx(plain.norms, rel=3e-5)
    assert ours.weights.keys() == plain.weights.keys()
    assert names_in(out) == names_in(folder)
    again, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    for name, param in again.named_parameters():
        assert torch.equal(param, ours.weights[name]), name


@pytest.mark.parametrize(
    ("family", "bias"),
    [
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),  # a buffer
        ("ernie4_5_moe", "model.layers.1.mlp.moe_statics.e_score_correction_bias"),  # a frozen parameter
    ],
)
def test_routers_in_a_model_of_bfloat16(family: str, bias: str, tmp_path: Path) -> None:
    """Their weights, which transformers makes in float32, are reduced with the layer's; what corrects their choice is
    not trained, and as precise in the end as in the files."""
    from transformers import AutoModelForCausalLM

    folder, out = save_family(family, tmp_path / "model"), tmp_path / "out"
    tensors = load_file(folder / "model.safetensors")
    tensors[bias] = torch.linspace(0.1, 0.1003, tensors[bias].numel()).view_as(tensors[bias])
    assert len(tensors[bias].bfloat16().unique()) == 1, "else rounding would not show"
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plain_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    plain = plain_train(plain_model, param_groups(plain_model, SETUP), STEPS, SETUP.lr, clip=0.0)
    ours = run_on_ranks(2, train_job, folder, 3, out, torch.bfloat16)[0]
    assert {weight.dtype for name, weight in ours.weights.items() if "correction" not in name} == {torch.bfloat16}
    assert ours.losses == pytest.approx(plain.losses, rel=1e-2)
    assert ours.norms == pytest.approx(plain.norms, rel=5e-2)
    run_on_ranks(2, export_job, folder, tmp_path / "rounded")
    for written in (out, tmp_path / "rounded"):
        shards = [load_file(path) for path in written.glob("*.safetensors")]
        saved = {name: tensor for shard in shards for name, tensor in shard.items()}
        assert torch.equal(saved.pop(bias), tensors[bias])
        assert all(tensor.dtype == (torch.float32 if written == out else torch.bfloat16) for tensor in saved.values())


def export_job(folder: Path, out: Path) -> None:
    """The files' model, written in bfloat16."""
    hf_config = load_hf_config(folder, False)
    model = build_on_meta(hf_config, ModelConfig(model_name_or_path=str(folder)), torch.float32)
    stored = check_weights(model, folder)
    shard_model(model, 3, make_mesh(3, "cpu"))
    materialise(model, CPU)
    load_weights(model, folder, stored)
    save_model(
        *(model, out), hf_config=hf_config, tokenizer=None, dtype="bfloat16", max_shard_bytes=10**9, layout=stored
    )


# ---- another objective --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "more", "said"),
    [
        ("bert", {}, "BertLMHeadModel lets every token see those that follow it"),
        ("roformer", {}, "RoFormerForCausalLM lets every token see"),
        ("xlm", {}, "XLMWithLMHeadModel lets every token see"),
        ("xlnet", {}, "XLNetLMHeadModel lets every token see"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits asks for the auxiliary loss"),
        ("bert", {"is_decoder": True}, None),
        ("gpt_neox", {}, None),
        ("mixtral", {}, None),
    ],
)
def test_models_of_another_objective_are_refused(family: str, more: dict[str, Any], said: str | None) -> None:
    from transformers import AutoConfig

    values = FAMILIES[family][1] if family in FAMILIES else {}
    hf_config = AutoConfig.for_model(family, **(values | more))
    if said is None:
        build_on_meta(hf_config, ModelConfig(model_name_or_path="m"), torch.float32)
        return
    with pytest.raises(UserError, match=f"^m/config.json: {said}"):
        build_on_meta(hf_config, ModelConfig(model_name_or_path="m"), torch.float32)


def gemma3_config() -> Any:
    """Text and images."""
    from transformers import AutoConfig

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return AutoConfig.for_model(
        "gemma3", text_config=FAMILIES["gemma2"][1], vision_config=vision | {"image_size": 28, "patch_size": 14}
    )


def test_what_text_does_not_train_has_to_be_frozen() -> None:
    """Else weight decay would move an image tower that has no gradient."""
    freeze = ("model.multi_modal_projector.*", "model.vision_tower.*")
    with pytest.raises(UserError) as caught:
        build_on_meta(gemma3_config(), ModelConfig(model_name_or_path="m"), torch.float32)
    (line,) = caught.value.problems
    assert line.startswith("model.freeze: Gemma3ForConditionalGeneration has parts that text does not train; add ")
    assert all(repr(pattern) in line for pattern in freeze)
    model = build_on_meta(gemma3_config(), ModelConfig(model_name_or_path="m", freeze=freeze), torch.float32)
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert trained and all(name.startswith("model.language_model.") for name in trained)


def test_a_language_model_inside_of_something_larger_is_refused() -> None:
    """transformers builds the text model alone, and the export would claim to be the whole."""
    from transformers import AutoConfig

    hf_config = AutoConfig.for_model("qwen3_5")
    with pytest.raises(UserError, match="a Qwen3_5Config describes more than the language model Qwen3_5ForCausalLM"):
        build_on_meta(hf_config, ModelConfig(model_name_or_path="m"), torch.float32)


@pytest.mark.parametrize("family", ["mamba", "rwkv", "mpt", "xglm", "bart", "nemotron_h"])
def test_flops_are_counted_where_attention_is_missing_or_has_other_names(family: str) -> None:
    from transformers import AutoConfig

    from heavylift.train.flops import ModelShape

    shape = ModelShape.from_config(AutoConfig.for_model(family).to_dict(), 10**11)
    assert shape.formula != "dense" and shape.num_layers > 1
    assert (shape.heads == 0) == (family in ("mamba", "rwkv"))


def test_a_config_whose_layers_differ_is_read_for_the_largest() -> None:
    from transformers import AutoConfig

    from heavylift.memory.activations import LayerShape

    config = AutoConfig.for_model("gemma4_text")
    shape = LayerShape.from_config(config)
    assert shape is not None
    assert shape.query_width == shape.num_heads * max(layer.head_dim for layer in config.per_layer_config)


def seed_job(recipe: Path, cache: Path) -> int:
    """The seed that dropout draws from, once a run is set up."""
    from heavylift.config.recipe import load_recipe
    from heavylift.train import setup

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setattr(setup, "start_process_group", lambda ranks: None)  # the pool has one
        setup.set_up(load_recipe(recipe)).engine.optimizer.close()
    return torch.initial_seed()


def test_dropout_goes_by_the_recipes_seed_and_differs_between_ranks(write_recipe: Any, tmp_path: Path) -> None:
    seeds = [
        run_on_ranks(2, seed_job, write_recipe(train={"seed": seed}, launch={"nproc": 2}), tmp_path / "cache")
        for seed in (1, 2, 1)
    ]
    assert seeds[0] == seeds[2] and len({*seeds[0], *seeds[1]}) == 4


# ---- merged experts -----------------------------------------------------------------------------------------------


def test_an_expert_that_is_missing_is_told(tmp_path: Path) -> None:
    folder = save_family("mixtral", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = build_on_meta(load_hf_config(folder, False), ModelConfig(model_name_or_path=str(folder)), torch.float32)
    with pytest.raises(UserError) as caught:
        check_weights(model, folder)
    (line,) = caught.value.problems
    assert "model.layers.1.mlp.experts.gate_up_proj (3, 48, 16) consists of 5 tensors" in line


def test_experts_that_lie_in_several_files(tmp_path: Path) -> None:
    """Pieces of one parameter come from wherever they are."""
    from transformers import AutoModelForCausalLM

    folder = save_family("qwen3_moe", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    parts = [dict(list(sorted(tensors.items()))[start::3]) for start in range(3)]
    (folder / "model.safetensors").unlink()
    for index, part in enumerate(parts):
        save_file(part, folder / f"part-{index}.safetensors", metadata={"format": "pt"})
    weight_map = {name: f"part-{index}.safetensors" for index, part in enumerate(parts) for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    model = build_on_meta(load_hf_config(folder, False), ModelConfig(model_name_or_path=str(folder)), torch.float32)
    materialise(model, CPU)
    load_weights(model, folder)
    for name, param in AutoModelForCausalLM.from_pretrained(folder).named_parameters():
        assert torch.equal(model.get_parameter(name), param), name


def random_export_job(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """A model of random weights, for which no file is read."""
    hf_config = load_hf_config(folder, False)
    config = ModelConfig(model_name_or_path=str(folder), init="random")
    model = build_on_meta(hf_config, config, torch.float32)
    layout = default_layout(model)
    shard_model(model, 3, make_mesh(3, "cpu"))
    materialise(model, CPU)
    init_random_weights(model, 0.02, seed=1)
    save_model(
        *(model, out),
        hf_config=hf_config,
        tokenizer=None,
        dtype="float32",
        max_shard_bytes=10**9,
        layout=layout,
        generation_config=folder / "generation_config.json",
    )
    return {name: whole(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["mixtral", "gpt_neox"])
def test_random_weights_are_written_by_the_names_of_the_hub(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, out = save_family(family, tmp_path / "model"), tmp_path / "out"
    settings = '{"eos_token_id": [2, 7], "temperature": 0.6}'  # without do_sample: transformers reads it only
    (folder / "generation_config.json").write_text(settings)
    weights = run_on_ranks(2, random_export_job, folder, out)[0]
    assert (out / "generation_config.json").read_text() == settings
    assert names_in(out) == names_in(folder)
    for name, param in AutoModelForCausalLM.from_pretrained(out).named_parameters():
        assert torch.equal(param, weights[name]), name


# ---- buffers ------------------------------------------------------------------------------------------------------


class OwnBuffer(torch.nn.Module):
    """Has a buffer, or a plain tensor, that only its constructor computes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        if kind == "buffer":
            self.register_buffer("table", torch.arange(3.0), persistent=False)
        else:
            self.table = torch.arange(3.0)

    def _init_weights(self, module: torch.nn.Module) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("buffer", "OwnBuffer: buffer table is in no checkpoint and its _init_weights does not compute it"),
        ("tensor", "OwnBuffer: table is a tensor that is neither parameter nor buffer"),
    ],
)
def test_values_that_only_a_constructor_computes_are_refused(kind: str, said: str) -> None:
    with torch.device("meta"):
        model = OwnBuffer(kind)
    with pytest.raises(UserError, match=said):
        materialise(model, CPU)
