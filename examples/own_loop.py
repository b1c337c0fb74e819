"""The engine in a script of your own: torch and `pipeline.engine`, nothing else of this project.

    python -m examples.own_loop

A regression on made-up data: mixed precision, an effective batch of 64 from micro-batches of 16, clipping, a
schedule, an average of the weights. On a GPU: device="cuda" and the model moved there.
"""

import torch
from torch import nn

from pipeline.engine import (
    MeanSquaredError,
    Precision,
    ScalerSettings,
    Schedule,
    Trainer,
    WeightAverage,
    build_optimizer,
)

torch.manual_seed(0)
inputs = torch.randn(1000, 8)
targets = torch.sin(inputs).sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
average = WeightAverage(model, decay=0.98)

trainer = Trainer(
    model,
    build_optimizer(model, "adamw", lr=1e-2, weight_decay=0.01),
    MeanSquaredError(),
    precision=Precision("amp_fp16", device="cpu", scaler=ScalerSettings(growth_interval=50)),
    micro_batch_size=16,
    max_grad_norm=1.0,
    schedule=Schedule("cosine", total_steps=20 * 16, warmup_fraction=0.05),
    average=average,
)
for epoch in range(20):
    order = torch.randperm(len(inputs)).split(64)  # 16 windows, the last one of 40 samples
    results = [trainer.step((inputs[window], targets[window])) for window in order]
    print(f"epoch {epoch + 1:2}  loss {results[-1].loss:.4f}  scale {results[-1].loss_scale:g}")

print(f"{trainer.state.optimizer_steps} updates, {trainer.state.skipped_steps} skipped")
with average.swapped_in(), torch.no_grad():
    print(f"loss of the averaged weights: {nn.functional.mse_loss(model(inputs), targets):.4f}")
