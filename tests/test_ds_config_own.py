"""The `heavylift` block of a ds_config: what arrives, what is refused, and that its exact settings keep every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from ds_configs import write_config
from parity_api.models import MAKERS, make_branches
from parity_api.runs import Case, ds_config, train
from pydantic import ValidationError
from ranks.pool import run_on_ranks
from typer.testing import CliRunner

from heavylift.cli.main import app
from heavylift.config.deepspeed.keys import key_of
from heavylift.config.deepspeed.own import Heavylift
from heavylift.config.deepspeed.parse import interpret, load_settings
from heavylift.config.deepspeed.settings import BatchSizes, OffloadSettings, Precision, Settings
from heavylift.config.recipe import load_recipe
from heavylift.config.schema import EngineConfig, Schedule, StateFormat, Tier
from heavylift.errors import UserError

BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
BF16_STATES = {"bf16": {"enabled": True, "bf16_optimizer_states": True}}
DEVICE = "zero_optimization.offload_optimizer.device"


def offload(device: str | None = "cpu") -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": device}}}


def own(**keys: Any) -> dict[str, Any]:
    return {"heavylift": keys}


# ---- what arrives ----------------------------------------------------------------------------------------------------


def test_the_block_arrives() -> None:
    asked = own(state_format="split", gradients_on="device", streamed_share=0.5, schedule="speculative")
    got = load_settings(BASE | BF16 | offload() | asked, 1)
    assert got.state_format is StateFormat.SPLIT and got.notes == ()
    found = got.offload
    assert (found.gradients_on, found.streamed_share, found.schedule) == (Tier.DEVICE, 0.5, Schedule.SPECULATIVE)
    # the words of offload_optimizer.device
    for word, tier in (("cpu", Tier.HOST), ("none", Tier.DEVICE)):
        assert load_settings(BASE | BF16 | offload() | own(gradients_on=word), 1).offload.gradients_on is tier
    # the format is one on whatever tier
    assert load_settings(BASE | BF16 | own(state_format="split"), 1).state_format is StateFormat.SPLIT
    assert load_settings(BASE | own(state_format="int8"), 1).state_format is StateFormat.INT8
    assert load_settings(BASE | BF16_STATES | own(state_format="bf16"), 1).state_format is StateFormat.BF16
    # a bf16 block that is off asks for nothing
    off = {"bf16": {"enabled": False, "bf16_optimizer_states": True}}
    assert load_settings(BASE | off | own(state_format="fp32"), 1).state_format is StateFormat.FP32


def test_without_it_everything_is_as_before() -> None:
    for block in ({}, {"heavylift": None}, own(), own(state_format="fp32", gradients_on="host", streamed_share=0)):
        for device in ({}, offload(), offload("none")):
            assert load_settings(BASE | BF16 | device | block, 1) == load_settings(BASE | BF16 | device, 1)


@pytest.mark.parametrize("schedule", ["auto", "deferred", "synchronous"])
def test_schedules_with_a_loss_scale(schedule: str) -> None:
    half = {"torch_autocast": {"enabled": True, "dtype": "fp16"}}
    for precision in (FP16, half):
        got = load_settings(BASE | precision | offload() | own(schedule=schedule), 1).offload.schedule
        assert got == ("deferred" if schedule == "auto" else schedule)


def test_names_values_and_defaults_are_those_of_a_recipe() -> None:
    for name, field in Heavylift.model_fields.items():
        twin = EngineConfig.model_fields[name]
        assert field.default == twin.default, name
        for value in get_args(field.annotation) or (0, 0.25, 1):
            assert getattr(EngineConfig(offload_optimizer=Tier.HOST, **{name: value}), name) == value
    assert set(get_args(Heavylift.model_fields["state_format"].annotation)) == {one.value for one in StateFormat}
    assert set(get_args(Heavylift.model_fields["schedule"].annotation)) == {one.value for one in Schedule}


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("state_format", list(StateFormat))
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_is_refused_is_what_a_recipe_refuses(schedule: Schedule, state_format: StateFormat, share: float) -> None:
    keys: dict[str, Any] = {"state_format": state_format, "streamed_share": share, "schedule": schedule}
    try:
        EngineConfig(offload_optimizer=Tier.HOST, **keys)
        allowed = True
    except ValidationError:
        allowed = False
    config = BASE | BF16 | offload() | {"gradient_clipping": 0} | own(**{k: str(v) for k, v in keys.items()})
    config["heavylift"]["streamed_share"] = share
    found = interpret(config, 1).problems
    assert (found == ()) == allowed, found


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (own(state_formt="split"), "heavylift.state_formt: unknown key; did you mean heavylift.state_format?"),
        ({"heavyloft": {}}, "heavyloft: unknown key; did you mean heavylift?"),
        ({"streamed_share": 1}, "streamed_share: unknown key; did you mean heavylift.streamed_share?"),
        (own(state_format="auto"), "heavylift.state_format: expected one of fp32, split, bf16, int8, got "),
        (own(schedule="early"), "heavylift.schedule: expected one of auto, deferred, speculative, immediate, "),
        (offload() | own(streamed_share=1.5), "heavylift.streamed_share: expected a number from 0 to 1, got 1.5"),
        (
            BF16_STATES | own(state_format="split"),
            "heavylift.state_format: expected bf16, which bf16.bf16_optimizer_states asks for, got split; remove one",
        ),
        (
            BF16_STATES | own(state_format="fp32"),
            "heavylift.state_format: expected bf16, which bf16.bf16_optimizer_states asks for, got fp32; remove one",
        ),
        (
            own(state_format="split"),
            "heavylift.state_format: split needs bfloat16 parameters, which are half of its masters, got float32; set "
            "bf16.enabled to true, or heavylift.state_format to fp32",
        ),
        (
            FP16 | offload() | own(state_format="split"),
            "heavylift.state_format: split needs bfloat16 parameters, which are half of its masters, got float16; set "
            "bf16.enabled to true in place of fp16.enabled, or heavylift.state_format to fp32",
        ),
        (
            BF16 | offload() | own(state_format="int8", streamed_share=0.5),
            "heavylift.streamed_share: states in format int8 are not streamed, got 0.5; set it to 0, or ",
        ),
        (
            BF16 | offload() | own(state_format="bf16", schedule="speculative"),
            "heavylift.schedule: a step that speculative has taken too early cannot be taken back with "
            "heavylift.state_format bf16; choose auto, deferred or synchronous",
        ),
        (
            BF16_STATES | offload() | own(schedule="speculative"),
            "heavylift.schedule: a step that speculative has taken too early cannot be taken back with "
            "bf16.bf16_optimizer_states; choose auto, deferred or synchronous",
        ),
        (
            BF16 | offload() | own(state_format="int8", schedule="immediate") | {"gradient_clipping": 0},
            "heavylift.schedule: a step that immediate has taken too early cannot be taken back with ",
        ),
        (
            BF16 | offload() | own(schedule="immediate"),
            "heavylift.schedule: immediate steps before the gradient norm is known, and gradient_clipping is 1; set ",
        ),
        (
            FP16 | offload() | own(schedule="speculative"),
            "heavylift.schedule: speculative steps before an overflow of float16 is known, which must leave every bit",
        ),
        (
            own(streamed_share=0.5, schedule="immediate"),
            f"heavylift.streamed_share: has an effect with {DEVICE} cpu only, and that is not set; add it, or remove "
            "heavylift.streamed_share and heavylift.schedule",
        ),
        (
            BF16 | {"zero_optimization": {"stage": 2}} | own(schedule="deferred"),
            f"heavylift.schedule: has an effect with {DEVICE} cpu only, and that is not set; add it, or remove ",
        ),
        (offload("nvme") | own(streamed_share=0.5), f"{DEVICE}: heavylift has no NVMe tier"),
    ],
)
def test_an_impossible_block_is_one_line(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_settings(BASE | config, 1)
    assert len(caught.value.problems) == 1, caught.value.problems
    assert caught.value.problems[0].startswith(f"ds_config: {said}"), caught.value.problems[0]


def test_the_line_of_the_key_is_told(tmp_path: Path) -> None:
    path = write_config(tmp_path, BASE | FP16 | own(state_format="split"))
    path.write_text(path.read_text().replace('"state_format"', '\n"state_format"'))
    (problem,) = interpret(path, 1).problems
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if '"state_format"' in text)
    assert problem.startswith(f"{path}:{line}: heavylift.state_format: ")


def test_nothing_is_concluded_from_keys_that_are_wrong_themselves() -> None:
    config = BASE | {"bf16": {"enabled": "true"}} | offload() | own(state_format="split", streamed_share=0.5)
    assert [one.split(": ")[1] for one in interpret(config, 1).problems] == ["bf16.enabled"]


def test_who_asks_for_the_device_is_told_once() -> None:
    got = load_settings(BASE | BF16 | offload("none") | own(streamed_share=0.5, schedule="deferred"), 1)
    assert got.notes == (f"heavylift.{{streamed_share, schedule}}: no effect: {DEVICE} is none",)
    assert got.offload == OffloadSettings()


SGD = {"optimizer": {"type": "sgd", "params": {"lr": 0.1}}}
L2 = {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}}


@pytest.mark.parametrize(("optimizer", "why"), [(SGD, "type is SGD"), (L2, "params.adam_w_mode is false")])
def test_a_format_of_an_optimizer_without_formats_is_told_once(optimizer: dict[str, Any], why: str) -> None:
    text = f"no effect: only AdamW's states have a format, and optimizer.{why}"
    for block, key in ((BF16 | own(state_format="split"), "heavylift.state_format"), (BF16_STATES, "bf16.bf16_opti")):
        got = load_settings(BASE | block | optimizer, 1)
        assert got.state_format is StateFormat.FP32
        assert len(got.notes) == 1 and got.notes[0].startswith(key) and got.notes[0].endswith(text)
        for other in ({"type": "AdamW"}, {"type": "Adam", "params": {"adam_w_mode": False}}, {}):
            kept = load_settings(BASE | block | {"optimizer": other}, 1)
            assert kept.state_format is not StateFormat.FP32 and kept.notes == ()
    # what has no effect is in nobody's way
    assert interpret(BASE | own(state_format="split") | optimizer, 1).problems == ()
    assert load_settings(BASE | own(state_format="fp32") | optimizer, 1).notes == ()


def test_explain_shows_what_has_no_effect_beside_other_keys(tmp_path: Path) -> None:
    config = BASE | offload("none") | SGD | {"fp16": {"enabled": True, "loss_scale": 8, "hysteresis": 3}}
    config |= own(state_format="int8", streamed_share=0.5)
    done = CliRunner().invoke(app, ["config", "explain", str(write_config(tmp_path, config))])
    rows = {line.split()[0]: " ".join(line.split()) for line in done.stdout.splitlines() if line.strip()}
    assert rows["heavylift.state_format"].startswith('heavylift.state_format "int8" no effect only AdamW')
    assert rows["heavylift.streamed_share"].startswith("heavylift.streamed_share 0.5 no effect zero_optimization")
    assert rows["fp16.hysteresis"] == "fp16.hysteresis 3 no effect fp16.loss_scale 8 is a fixed factor"
    assert rows["fp16.loss_scale"].startswith("fp16.loss_scale 8 done ")
    assert rows["state_format"] == "state_format fp32" and "optimizer.betas" not in rows
    assert rows["optimizer.more"] == "optimizer.more lr 0.1"


def test_open_autos_are_no_problem_where_a_trainer_fills_them_in() -> None:
    config = BASE | {"bf16": {"enabled": "auto"}} | offload("auto") | own(state_format="split", streamed_share=0.5)
    assert interpret(config, 1, leave_open=True).problems == ()
    filled = {"bf16": True, DEVICE: "cpu"}
    assert load_settings(config, 1, defaults=filled).offload.streamed_share == 0.5
    assert len(interpret(config, 1).problems) == 2


def test_the_page_says_what_deepspeed_does_with_it() -> None:
    assert {key_of(field).there for field in Heavylift.model_fields.values()} == {"ignored"}


# ---- explain and convert ---------------------------------------------------------------------------------------------


def test_explain_shows_the_block(tmp_path: Path) -> None:
    path = write_config(tmp_path, BASE | BF16 | offload() | own(state_format="split", streamed_share=0.5))
    done = CliRunner().invoke(app, ["config", "explain", str(path)])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["offload.streamed_share", "0.5"] in rows and ["state_format", "split"] in rows
    assert any(row[:3] == ["heavylift.state_format", '"split"', "done"] for row in rows)


@pytest.mark.parametrize("schedule", ["auto", "synchronous"])
def test_convert_takes_the_block_over(tmp_path: Path, schedule: str) -> None:
    asked = own(state_format="split", gradients_on="device", streamed_share=0.25, schedule=schedule)
    path, out = write_config(tmp_path, BASE | BF16 | offload() | asked), tmp_path / "recipe.yaml"
    done = CliRunner().invoke(app, ["config", "convert", str(path), "--model", "m", "--dataset", "d", "-o", str(out)])
    assert done.exit_code == 0, done.output
    engine = load_recipe(out).engine
    assert (engine.state_format, engine.streamed_share, engine.schedule) == ("split", 0.25, schedule)
    assert engine.gradients_on is Tier.DEVICE


def test_convert_says_what_has_no_effect(tmp_path: Path) -> None:
    path = write_config(tmp_path, BASE | BF16 | offload("none") | own(streamed_share=0.25))
    done = CliRunner().invoke(app, ["config", "convert", str(path), "--model", "m", "--dataset", "d"])
    assert done.exit_code == 0
    assert f"# - heavylift.streamed_share: {DEVICE} is none" in done.stdout.splitlines()
    assert "streamed_share: 0" not in done.stdout


# ---- initialize() ----------------------------------------------------------------------------------------------------


def curves_job(stage: int, accumulation: int, blocks: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """(options, losses, norms, masters) of the same steps under each block."""
    import torch.distributed as dist

    import heavylift

    found = []
    for block in blocks:
        case = Case("llama", stage, "cpu", "bf16", accumulation)
        config = ds_config(case, dist.get_world_size(), heavylift=block)
        model = MAKERS["llama"]()
        engine, optimizer, *_ = heavylift.initialize(model=model, config=config, model_parameters=model.parameters())
        curve = train(engine, "llama", "bf16", accumulation)
        options = optimizer.options
        found.append(((options.state_format, options.streamed_share, options.schedule), *vars(curve).values()))
        engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "accumulation"), [(3, 1), (1, 4)])
def test_split_and_streamed_states_keep_every_bit(stage: int, accumulation: int) -> None:
    asked = [
        {},
        {"state_format": "split", "streamed_share": 0.5, "gradients_on": "device"},
        {"state_format": "split", "streamed_share": 1.0, "schedule": "synchronous"},
    ]
    for plain, *others in run_on_ranks(2, curves_job, stage, accumulation, asked):
        assert plain[0] == (StateFormat.FP32, 0.0, Schedule.AUTO)
        assert others[0][0] == (StateFormat.SPLIT, 0.5, Schedule.AUTO)
        assert others[1][0] == (StateFormat.SPLIT, 1.0, Schedule.SYNCHRONOUS)
        for other in others:
            assert other[1] == plain[1] and other[2] == plain[2]
            assert all(torch.equal(other[3][name], master) for name, master in plain[3].items())


def by_hand_job(settings: Settings) -> str:
    """What initialize() says to settings that no file could have come to."""
    import heavylift

    try:
        heavylift.initialize(model=make_branches(), config=settings, optimizer=torch.optim.AdamW)
    except UserError as error:
        return "\n".join(error.problems)
    return ""


def test_settings_by_hand_that_exclude_each_other_are_one_line() -> None:
    host = OffloadSettings(tier=Tier.HOST, streamed_share=0.5)
    batch = BatchSizes(1, 1, 1)
    for settings, said in (
        (Settings(batch, stage=3, state_format=StateFormat.SPLIT), "state format split needs bfloat16 parameters"),
        (
            Settings(batch, Precision.BF16, stage=3, offload=host, state_format=StateFormat.INT8),
            "states in format int8 are not streamed",
        ),
    ):
        (message,) = run_on_ranks(1, by_hand_job, settings)
        assert said in message and "\n" not in message, message


def test_a_share_for_the_host_without_a_device_is_told() -> None:
    def notes(**keys: object) -> tuple[str, ...]:
        return load_settings(BASE | {"zero_optimization": {"stage": 3, "offload_optimizer": keys}}, 1).notes

    why = f"no effect: {DEVICE} is not set, which means none"
    assert notes(ratio=0.5) == (f"zero_optimization.offload_optimizer.ratio: {why}",)
    assert notes(ratio=0.5, device="none") == (), "off on purpose"
    assert notes(ratio=0.5, device="cpu") == notes(ratio=1.0) == ()
