"""Classifies small pictures with a small network, as DeepSpeed's first tutorial does. Nothing of heavylift in here.

small_images.py --deepspeed [--stage 2] [--dtype bf16] [--epochs 1] [--report FILE]
"""

import argparse
import json

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger


def add_argument() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="small images")
    parser.add_argument("-e", "--epochs", default=1, type=int)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--log-interval", type=int, default=4)
    parser.add_argument("--dtype", default="fp32", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--stage", default=0, type=int, choices=[0, 1, 2, 3])
    parser.add_argument("--train_batch_size", default=16, type=int)
    parser.add_argument("--report", default=None)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


class Pictures(torch.utils.data.Dataset):
    """Noise, brighter in one quarter: the class says in which."""

    def __init__(self, num_pictures: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 4, (num_pictures,), generator=generator)
        self.pictures = torch.randn(num_pictures, 3, 16, 16, generator=generator)
        for picture, label in zip(self.pictures, self.labels, strict=True):
            row, column = 8 * (int(label) // 2), 8 * (int(label) % 2)
            picture[:, row : row + 8, column : column + 8] += 1.0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pictures[index], self.labels[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 3)
        self.fc1 = nn.Linear(16 * 2 * 2, 40)
        self.fc2 = nn.Linear(40, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


def get_ds_config(args: argparse.Namespace) -> dict:
    return {
        "train_batch_size": args.train_batch_size,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.003, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.003, "warmup_num_steps": 4},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {
            "enabled": args.dtype == "fp16",
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    }


def main() -> None:
    args = add_argument()
    deepspeed.init_distributed()
    torch.manual_seed(7)
    trainset, testset = Pictures(96, seed=1), Pictures(64, seed=2)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, optimizer, trainloader, __ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=trainset, config=get_ds_config(args)
    )
    local_device = get_accelerator().device_name(model_engine.local_rank)
    target_dtype = None
    if model_engine.bfloat16_enabled():
        target_dtype = torch.bfloat16
    elif model_engine.fp16_enabled():
        target_dtype = torch.half
    criterion = nn.CrossEntropyLoss()
    losses = []
    for epoch in range(args.epochs):
        for i, data in enumerate(trainloader):
            inputs, labels = data[0].to(local_device), data[1].to(local_device)
            if target_dtype is not None:
                inputs = inputs.to(target_dtype)
            outputs = model_engine(inputs)
            loss = criterion(outputs.float(), labels)
            model_engine.backward(loss)
            model_engine.step()
            mean = loss.detach().clone()
            deepspeed.comm.all_reduce(mean)
            losses.append(mean.item() / deepspeed.comm.get_world_size())
            if deepspeed.comm.get_rank() == 0 and i % args.log_interval == args.log_interval - 1:
                logger.info(f"[{epoch + 1}, {i + 1:5d}] loss: {losses[-1]:.3f}")
    correct = 0
    model_engine.eval()
    with torch.no_grad():
        for picture, label in torch.utils.data.DataLoader(testset, batch_size=16):
            picture = picture.to(local_device)
            outputs = model_engine(picture if target_dtype is None else picture.to(target_dtype))
            correct += int((outputs.argmax(1).cpu() == label).sum())
    if deepspeed.comm.get_rank() == 0:
        print(f"accuracy on {len(testset)} pictures: {100 * correct / len(testset):.0f} %")
        if args.report:
            with open(args.report, "w") as file:
                json.dump({"losses": losses, "accuracy": correct / len(testset)}, file)


if __name__ == "__main__":
    main()
