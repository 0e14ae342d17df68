"""Keys of a ds_config together: every impossible combination is one clear line; what "auto" comes to."""

from __future__ import annotations

from typing import Any

import pytest

from heavylift.config.deepspeed.parse import load_settings
from heavylift.config.deepspeed.settings import Precision
from heavylift.config.schema import Tier
from heavylift.errors import UserError

BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
ON, CPU, NVME = {"enabled": True}, {"device": "cpu"}, {"device": "nvme", "nvme_path": "/x"}


def zero(stage: int = 3, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"fp16": ON, "bf16": ON}, "fp16.enabled: expected one of fp16 and bf16, got both"),
        (
            {"bf16": ON, "torch_autocast": {"enabled": True, "dtype": "float16"}},
            "torch_autocast.dtype: expected bfloat16, the parameters' dtype by bf16.enabled, got float16",
        ),
        ({"bf16": ON, "data_types": {"param_dtype": "fp16"}}, "data_types.param_dtype: expected bfloat16, as"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 3, "min_loss_scale": 16}},
            "fp16.min_loss_scale: expected at most the first scale 2^3, got 16",
        ),
        (zero(0, offload_optimizer=CPU), "zero_optimization.offload_optimizer.device: cpu needs sharded optimizer"),
        (zero(0, cpu_offload=True), "zero_optimization.offload_optimizer.device: cpu needs sharded optimizer"),
        (
            zero(2, offload_param=CPU),
            "zero_optimization.offload_param.device: cpu needs sharded parameters, and stage 2",
        ),
        (zero(1, cpu_offload_params=True), "zero_optimization.offload_param.device: cpu needs sharded parameters"),
        (zero(3, offload_optimizer=NVME), "zero_optimization.offload_optimizer.device: heavylift has no NVMe tier"),
        (zero(3, offload_param=NVME), "zero_optimization.offload_param.device: heavylift has no NVMe tier"),
        (
            zero(3, offload_optimizer={"device": "none", "super_offload": True}),
            "zero_optimization.offload_optimizer.super_offload: steps states that are on the host, and device is none",
        ),
        (
            zero(3, cpu_offload=True, offload_optimizer={"device": "none"}),
            "zero_optimization.cpu_offload: the old form of offload_optimizer, which is given too",
        ),
        ({"optimizer": {"type": "AdmW"}}, "optimizer.type: unknown optimizer AdmW; did you mean AdamW?"),
        ({"optimizer": {"type": "Quux"}}, "optimizer.type: unknown optimizer Quux; expected one of Adam, AdamW, "),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type: missing beside optimizer.params"),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 1}}} | zero(1, offload_optimizer=CPU),
            "optimizer.type: only Adam and AdamW can have their states on the host, got SGD",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}}
            | zero(1, offload_optimizer=CPU),
            "optimizer.params.adam_w_mode: false (L2 decay in the gradient) works with states on the device only",
        ),
        (
            {"optimizer": {"type": "Adam", "params": dict(weight_decay=0.1, adam_w_mode=False, bias_correction=False)}},
            "optimizer.params.bias_correction: false is there with decoupled weight decay only; remove it, or set",
        ),
        ({"scheduler": {"type": "WarmupL"}}, "scheduler.type: unknown scheduler WarmupL; did you mean WarmupLR?"),
        ({"scheduler": {"type": "StepDown"}}, "scheduler.type: unknown scheduler StepDown; expected one of WarmupLR"),
        ({"scheduler": {"params": {"warmup_num_steps": 1}}}, "scheduler.type: missing beside scheduler.params"),
        (
            {"scheduler": {"type": "WarmupDecayLR"}},
            "scheduler.params.total_num_steps: WarmupDecayLR needs it, got nothing; give the number",
        ),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}},
            'scheduler.params.total_num_steps: WarmupCosineLR needs it, got "auto", which nobody filled in',
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1}}},
            "scheduler.params.cycle_max_lr: OneCycle needs it, got nothing",
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1, "cycle_max_lr": 0.1}}},
            "scheduler.params.cycle_min_lr: expected at most cycle_max_lr 0.1, got 1",
        ),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op: gradients are averaged over the ranks, got sum"),
        ({"data_parallel_size": 4}, "data_parallel_size: expected the world size 2, got 4"),
        ({"steps_per_print": "auto"}, 'steps_per_print: expected a whole number ≥ 1, got "auto", which nothing fills'),
    ],
)
def test_an_impossible_combination_is_one_line(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_settings(BASE | config, 2)
    assert len(caught.value.problems) == 1, caught.value.problems
    assert caught.value.problems[0].startswith(f"ds_config: {said}"), caught.value.problems[0]


def test_nothing_is_concluded_from_a_key_that_is_wrong_itself() -> None:
    config = BASE | zero("3", offload_optimizer=CPU, offload_param=CPU)  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        load_settings(config, 1)
    assert [problem.split(": ")[1] for problem in caught.value.problems] == ["zero_optimization.stage"]


@pytest.mark.parametrize(
    ("config", "note"),
    [
        (
            {"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 100}},
            "fp16.loss_scale_window: no effect: fp16.loss_scale 128 is a fixed factor",
        ),
        (
            zero(1, offload_optimizer={"device": "cpu", "pin_memory": False}),
            "zero_optimization.offload_optimizer.pin_memory: no effect: staging buffers are page-locked",
        ),
        (
            zero(1, offload_optimizer={"device": "cpu", "super_offload": False}),
            "zero_optimization.offload_optimizer.super_offload: no effect: device cpu always gets the overlapped step",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}},
            "optimizer.params.adam_w_mode: no effect: AdamW's decay is decoupled",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}},
            "scheduler.params.warmup_max_lr: not given: 0.001, as in DeepSpeed, whatever optimizer.params.lr is",
        ),
        (
            zero(3, offload_param=CPU),
            "zero_optimization.offload_param.device: no effect: parameters stay sharded on the device",
        ),
    ],
)
def test_what_is_possible_and_without_effect_is_a_note(config: dict[str, Any], note: str) -> None:
    notes = load_settings(BASE | config, 1).notes
    assert len(notes) == 1 and notes[0].startswith(note), notes


def test_what_is_done_anyway_is_no_note() -> None:
    config = BASE | zero(1, offload_optimizer={"device": "cpu", "pin_memory": True, "super_offload": True})
    assert load_settings(config, 1).notes == ()


def test_keys_with_the_same_reason_share_a_note() -> None:
    block = {"device": "cpu", "pin_memory": True, "buffer_count": 2, "max_in_cpu": 1e8, "nvme_path": "/x"}
    config = BASE | zero(3, offload_param=block, reduce_bucket_size=1, sub_group_size=1, allgather_bucket_size=2)
    config |= {"prescale_gradients": True, "gradient_predivide_factor": 2.0}
    notes = load_settings(config, 1).notes
    assert [note.split(": no effect: ")[0] for note in notes] == [
        "zero_optimization.offload_param.device",
        "zero_optimization.offload_param.{pin_memory, buffer_count, max_in_cpu}",
        "zero_optimization.offload_param.nvme_path",
        "zero_optimization.{reduce_bucket_size, allgather_bucket_size}",
        "zero_optimization.sub_group_size",
        "prescale_gradients, gradient_predivide_factor",
    ]


def test_combinations_that_are_fine() -> None:
    both = load_settings(BASE | {"bf16": ON, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, 1)
    assert both.precision is Precision.BF16 and both.autocast is not None
    half = load_settings(BASE | {"fp16": ON, "torch_autocast": ON}, 1)
    assert half.autocast is not None and half.autocast.dtype is Precision.FP16 and half.loss_scale is not None
    # without decay Adam's two modes are the same arithmetic; parameter groups may decay by themselves
    adam = {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}
    host = load_settings(BASE | adam | zero(1, offload_optimizer=CPU), 1)
    assert host.optimizer is not None and not host.optimizer.decoupled and host.offload.tier is Tier.HOST
    l2 = {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}}
    device = load_settings(BASE | l2, 1).optimizer
    assert device is not None and not device.decoupled
    assert load_settings(BASE | {"data_parallel_size": 2}, 2).notes[0].startswith("data_parallel_size: no effect")
    assert not load_settings(BASE | {"bf16": {"enabled": True, "check_grad_overflow": False}}, 1).skip_nonfinite


def test_auto_takes_what_the_trainer_knows() -> None:
    params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    rates = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": params},
        "scheduler": {"type": "WarmupDecayLR", "params": rates},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    }
    known = {
        "lr": 3e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-6,
        "weight_decay": 0.1,
        "warmup_min_lr": 0,
        "warmup_num_steps": 10,
        "total_num_steps": 100,
        "bf16": True,
        "fp16": False,
        "hidden_size": 64,
        "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": 8,
        "lr_unknown_is_none": None,
    }
    got = load_settings(config, 2, defaults=known)
    assert got.notes == () and got.precision is Precision.BF16 and got.gradient_clipping == 0.5
    assert got.batch.train_batch == 16
    assert got.optimizer is not None and got.optimizer.betas == (0.9, 0.95) and got.optimizer.lr == 3e-4
    assert got.scheduler is not None
    assert got.scheduler.params == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 3e-4,
        "warmup_num_steps": 10,
        "total_num_steps": 100,
    }


def test_auto_that_stays_open_is_said_with_what_it_became() -> None:
    config = BASE | {"gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"betas": "auto"}}}
    assert load_settings(config, 1).notes == (
        'gradient_clipping: "auto" that nobody filled in: 1.0',
        'optimizer.params.betas: "auto" that nobody filled in: [0.9, 0.999]',
    )


def test_a_schedulers_highest_rate_is_the_files_learning_rate() -> None:
    config = BASE | {
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    }
    scheduler = load_settings(config, 1).scheduler
    assert scheduler is not None and scheduler.params == {"warmup_max_lr": 5e-5}


def test_a_trainers_bad_value_is_an_error_of_its_key() -> None:
    config = BASE | {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    with pytest.raises(UserError, match=r"optimizer.params.lr: expected a number ≥ 0, got -1"):
        load_settings(config, 1, defaults={"lr": -1})


def test_the_bound_of_a_key_that_may_be_left_out_is_told() -> None:
    scheduler = {"type": "WarmupCosineLR", "params": {"total_num_steps": 0}}
    with pytest.raises(UserError, match=r"scheduler.params.total_num_steps: expected a whole number ≥ 1, got 0"):
        load_settings({"train_batch_size": 1, "scheduler": scheduler}, 1)
