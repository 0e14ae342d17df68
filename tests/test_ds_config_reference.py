"""docs/deepspeed_config.md says what the schema says, and knows every key of DeepSpeed's surface."""

from __future__ import annotations

from pathlib import Path

import pytest

from heavylift.config.deepspeed.keys import Status, key_of
from heavylift.config.deepspeed.reference import main, render, row, sections
from heavylift.config.deepspeed.schema import DeepSpeedConfig

PAGE = Path(__file__).parents[1] / "docs" / "deepspeed_config.md"

# What DeepSpeed 0.19 reads at the top level. A key that goes missing here would become an error in people's files.
TOP_LEVEL = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
steps_per_print wall_clock_breakdown memory_breakdown dump_state dataloader_drop_last log_level
seq_parallel_communication_data_type
sequence_parallel_size data_parallel_size communication_data_type prescale_gradients gradient_predivide_factor
gradient_allreduce_op sparse_gradients disable_allgather disable_python_gc gradient_clipping graph_harvesting
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer use_data_before_expert_parallelism vocabulary_size timers
optimizer scheduler fp16 bf16 bfloat16 torch_autocast amp data_types zero_optimization aio activation_checkpointing
tensorboard csv_monitor wandb comet flops_profiler comms_logger tensor_parallel expert_parallel pipeline checkpoint
compile elasticity autotuning data_efficiency curriculum_learning progressive_layer_drop eigenvalue sparse_attention
hybrid_engine nebula datastates weight_quantization compression_training
""".split()


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m heavylift.config.deepspeed.reference"


def test_every_top_level_key_is_known() -> None:
    known = {name for key, field in DeepSpeedConfig.model_fields.items() for name in (key, *key_of(field).aliases)}
    assert set(TOP_LEVEL) <= known


def test_every_key_has_one_row_with_a_status_and_a_text() -> None:
    lines = [line.replace("\\|", "/") for line in render().splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(rows) == sum(len(block.model_fields) for _, block in sections())
    assert all(len(cells) == 5 and all(cells) for cells in rows)
    assert {cells[3] for cells in rows} == {status.value for status in Status}
    # what does nothing has no default here
    assert all((cells[2] == "–") == (cells[3] != "done") for cells in rows)


def test_rows_tell_both_defaults_and_all_names() -> None:
    rows = {name: row(name, field) for _, block in sections() for name, field in block.model_fields.items()}
    assert rows["gradient_clipping"][1:4] == ("1.0 (0.0 up to 0.19.2)", "`1.0`", "done")
    assert rows["check_grad_overflow"][1:3] == ("true (stages 1, 2 only)", "`true`")
    assert rows["prefetch_bucket_size"][:3] == ("`prefetch_bucket_size`, `stage3_prefetch_bucket_size`", "`5e7`", "–")
    assert rows["zenflow"][3] == "refused" and "`topk_ratio`" in rows["zenflow"][4]


def test_the_command_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.md"
    assert main(["--check", str(path)]) == 1
    assert "out of date" in capsys.readouterr().err
    assert main([str(path)]) == 0 and path.read_text(encoding="utf-8") == render()
    assert main(["--check", str(path)]) == 0
    assert main(["--chekc"]) == 2
    assert main([str(tmp_path / "no" / "page.md")]) == 2
    assert "change the path" in capsys.readouterr().err
