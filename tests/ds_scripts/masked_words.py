"""Trains a small BERT to fill in masked words, as DeepSpeed's second tutorial does. Nothing of heavylift in here.

masked_words.py --checkpoint_dir DIR [--num_iterations 24] [--load_checkpoint_dir DIR] [--stage 3]
"""

import argparse
import json
import pathlib

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from transformers import BertConfig, BertForMaskedLM

VOCAB, MASK, LENGTH = 20, 1, 12


class MaskedSentences(torch.utils.data.Dataset):
    """Sentences that say one word again and again; every third place is masked."""

    def __init__(self, num_sentences: int) -> None:
        generator = torch.Generator().manual_seed(0)
        starts = torch.randint(2, VOCAB, (num_sentences,), generator=generator)
        self.words = starts[:, None].repeat(1, LENGTH)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index]
        masked = torch.arange(LENGTH) % 3 == index % 3
        return {
            "input_ids": torch.where(masked, MASK, words),
            "attention_mask": torch.ones_like(words),
            "labels": torch.where(masked, words, -100),
        }


def create_model() -> BertForMaskedLM:
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def train(args: argparse.Namespace) -> None:
    ds_config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": args.stage, "offload_optimizer": {"device": "cpu"}},
    }
    if args.stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=ds_config):
            model = create_model()
    else:
        model = create_model()
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-2, weight_decay=0.01)
    model, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=model.parameters(), config=ds_config
    )
    data = model.deepspeed_io(MaskedSentences(1024))
    start_step = 1
    if args.load_checkpoint_dir is not None:
        _, client_state = model.load_checkpoint(load_dir=args.load_checkpoint_dir)
        start_step = client_state["checkpoint_step"] + 1
    model.train()
    losses, facts = [], {}
    batches = iter(data)
    for step in range(1, args.num_iterations + 1):
        batch = {key: value.to(model.device) for key, value in next(batches).items()}
        if step < start_step:
            continue
        loss = model(**batch).loss
        model.backward(loss)
        if step == args.num_iterations:
            weight = model.module.bert.encoder.layer[0].intermediate.dense.weight
            facts = {
                "grad": safe_get_full_grad(weight).norm().item(),
                "param": safe_get_full_fp32_param(weight).norm().item(),
                "exp_avg": list(safe_get_full_optimizer_state(weight, "exp_avg").shape),
            }
        model.step()
        deepspeed.comm.all_reduce(mean := loss.detach().float().clone())
        losses.append(mean.item() / deepspeed.comm.get_world_size())
        if step == args.checkpoint_every:
            model.save_checkpoint(save_dir=args.checkpoint_dir, client_state={"checkpoint_step": step})
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=None):
        facts["sum"] = sum(p.double().sum().item() for p in model.module.parameters())
    if deepspeed.comm.get_rank() == 0:
        report = {"losses": losses, **facts}
        (pathlib.Path(args.checkpoint_dir) / args.report).write_text(json.dumps(report))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint_dir", required=True)
    parser.add_argument("--load_checkpoint_dir", default=None)
    parser.add_argument("--checkpoint_every", type=int, default=12)
    parser.add_argument("--num_iterations", type=int, default=24)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--report", default="report.json")
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.init_distributed()
    torch.manual_seed(3)
    train(parser.parse_args())
