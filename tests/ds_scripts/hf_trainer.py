"""Fine-tunes a tiny language model with the Hugging Face Trainer, as such scripts are written. Nothing of heavylift.

python hf_trainer.py --model FOLDER --output_dir DIR [--deepspeed ds_config.json] [--max_steps 6] [--resume]
"""

import argparse
import json
import os

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed


class Rows(torch.utils.data.Dataset):
    """Token ids that a generator gives: the same for everybody."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, vocab_size, (num_rows, 10), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--deepspeed", default=None)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--save_steps", type=int, default=0)
    parser.add_argument("--decay", type=float, default=0.0)
    parser.add_argument("--smoothing", type=float, default=0.0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    set_seed(1)
    args = TrainingArguments(
        output_dir=options.output_dir,
        deepspeed=options.deepspeed,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulation,
        max_steps=options.max_steps,
        learning_rate=1e-2,
        weight_decay=options.decay,
        label_smoothing_factor=options.smoothing,
        warmup_steps=2,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="steps" if options.save_steps else "no",
        save_steps=options.save_steps or 500,
        report_to=[],
        bf16=options.bf16,
        seed=1,
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(),
    )
    model = AutoModelForCausalLM.from_pretrained(options.model)
    data = Rows(64, model.config.vocab_size)
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=torch.utils.data.Subset(data, range(8)))
    trainer.train(resume_from_checkpoint=True if options.resume else None)
    evaluation = trainer.evaluate()
    trainer.save_model(os.path.join(options.output_dir, "final"))
    if trainer.is_world_process_zero():
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        result = {"eval_loss": evaluation["eval_loss"]}
        for key in ("loss", "grad_norm", "learning_rate"):
            result[key] = [entry[key] for entry in steps]
        with open(os.path.join(options.output_dir, "result.json"), "w") as file:
            json.dump(result, file)


if __name__ == "__main__":
    main()
