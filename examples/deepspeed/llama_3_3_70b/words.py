"""heavylift speaks of keys of a recipe, which whoever calls finetune.py has never seen: what sets them here instead."""

from __future__ import annotations

import re

SWITCHES = {
    "model.model_name_or_path": "--model_name (finetune.sh: MODEL)",
    "model.tokenizer_name_or_path": "--tokenizer_name",
    "model.attn_implementation": "--attn_implementation",
    "data.dataset": "--dataset",
    "data.chat_template": "--chat_template",
    "data.cutoff_len": "--max_length",
    "train.per_device_train_batch_size": "--batch_size",
    "train.gradient_checkpointing": "--activation_checkpointing",
    "train.num_train_epochs": "--num_train_epochs",
    "train.max_steps": "--bench_steps",
    "train.learning_rate": "--lr",
    "train.warmup_ratio": "--warmup_ratio",
    "train.weight_decay": "--weight_decay",
    "train.seed": "--seed",
    "train.report_to": "--use_wandb",
    "train.output_dir": "--output_dir",
    "engine.ratio": "RATIO",
    "engine.state_format": "heavylift.state_format",
    "engine.gradients_on": "heavylift.gradients_on",
    "launch.nproc": "NUM_GPUS",
}
"""Key of a recipe -> a switch of finetune.py, a variable of finetune.sh or a key of its ds_config."""

# not inside the name of a file or of a module
_KEY = re.compile(r"(?<![\w./-])(" + "|".join(map(re.escape, SWITCHES)) + r")(?![\w/-]|\.\w)")


def in_own_words(message: str) -> str:
    """The message with what this program calls the keys that it names; others stay as they are."""
    return _KEY.sub(lambda found: SWITCHES[found[0]], message)
