"""A training loop with Accelerate and its DeepSpeed plugin, as such scripts are written. Nothing of heavylift in here.

accelerate_loop.py --output FILE [--stage 3] [--config ds_config.json] [--plain] [--state_dir DIR]
"""

import argparse
import json
import os

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, PartialState
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--state_dir", default=None)
    parser.add_argument("--local_rank", type=int, default=-1)
    options = parser.parse_args()
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = None if options.plain else DeepSpeedPlugin(zero_stage=options.stage, gradient_clipping=1.0)
    if plugin is not None and options.stage == 3:
        plugin.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if not torch.cuda.is_available():
        PartialState(cpu=True)  # else accelerate takes several processes without a GPU for one
    accelerator = Accelerator(deepspeed_plugin=plugin)
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(64, 12, generator=generator), torch.randint(0, 4, (64,), generator=generator)
    data = torch.utils.data.TensorDataset(inputs, labels)
    loader = torch.utils.data.DataLoader(data, batch_size=16 // int(os.environ.get("WORLD_SIZE", 1)))
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses, norms = [], []
    for epoch in range(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            norms.append(float(norm))
            losses.append(accelerator.gather(loss.detach()[None]).mean().item())
        if epoch == 0 and options.state_dir:
            accelerator.save_state(options.state_dir)
    if options.state_dir:
        accelerator.load_state(options.state_dir)
        again = []
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            again.append(accelerator.gather(loss.detach()[None]).mean().item())
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        result = {"losses": losses, "norms": norms, "again": again if options.state_dir else []}
        result["weights"] = {name: tensor.double().sum().item() for name, tensor in weights.items()}
        with open(options.output, "w") as file:
            json.dump(result, file)


if __name__ == "__main__":
    main()
