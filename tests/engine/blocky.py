"""A small model of repeated blocks, and trainings of it with memory savers in any combination."""

import math
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from nets import CLASSES, window
from torch import Tensor, nn

from pipeline.engine import (
    CrossEntropy,
    Precision,
    ScalerSettings,
    Trainer,
    keep_state_on_host,
    offloaded,
    recompute,
    repeated_blocks,
    state_tensors,
)
from pipeline.engine.step import supervised

PRECISIONS = ("fp32", "amp_bf16", "amp_fp16")
WINDOWS = (10, 7, 10, 3, 10)  # samples; micro-batches of at most 4, unequal ones
BAD = 2  # this window holds an inf and is skipped


class Block(nn.Module):
    """Takes and returns a tuple, as many blocks do."""

    def __init__(self, batchnorm: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8) if batchnorm else nn.GroupNorm(4, 8),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
            nn.Conv2d(8, 8, 1),
        )

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: Tensor) -> tuple[Tensor, Tensor]:
        inputs, total = pair
        outputs = inputs + scale * self.body(inputs)
        return outputs, total + outputs


class Blocky(nn.Module):
    """A classifier of (N, 2, 6, 6) images with three blocks."""

    def __init__(self, batchnorm: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.blocks = nn.ModuleList([Block(batchnorm) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.head = nn.Linear(8 * 36, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        pair = (self.stem(images), torch.zeros(()))
        for block in self.blocks:
            pair = block(pair, scale=self.scale)
        return self.head(pair[1].flatten(1))


def blocky(batchnorm: bool = True) -> Blocky:
    torch.manual_seed(0)
    return Blocky(batchnorm)


def fused_adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For tensors so small that several threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Answered(Trainer):
    """A step for fake tensors: its one read is answered."""

    def read_device(self, packed: Tensor) -> list[float]:
        return [1.0] * packed.numel()


def saving_trainer(
    model: nn.Module,
    savers: Iterable[str],
    precision: str = "fp32",
    *,
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = fused_adamw,
    kind: type[Trainer] = Trainer,
    device: str = "cpu",
    cache_casts: bool = True,
    **options: object,
) -> Trainer:
    """savers: of "recompute", "offload" (of all sizes) and "state" (in buckets of a few tensors)."""
    chosen = optimizer(parameter for parameter in model.parameters() if parameter.requires_grad)
    if "recompute" in savers:
        recompute(model, repeated_blocks(model))
    if "state" in savers:
        keep_state_on_host(chosen, bucket_bytes=6000)
    settings = ScalerSettings(init_scale=1024.0, growth_interval=2) if precision == "amp_fp16" else None
    return kind(
        model,
        chosen,
        CrossEntropy(),
        precision=Precision(precision, device, settings, cache_casts=cache_casts),
        micro_batch_size=4,
        max_grad_norm=0.5,
        forward=offloaded(supervised, model, small_bytes=0) if "offload" in savers else supervised,
        **options,  # type: ignore[arg-type]
    )


def train(trainer: Trainer) -> list[Tensor]:
    """Weights, buffers and optimizer state after all windows; one of them was skipped, others clipped."""
    torch.manual_seed(1)
    clipped = 0
    for index, samples in enumerate(WINDOWS):
        images, labels = window(samples, index)
        if index == BAD:
            images[-1, 0, 0, 0] = math.inf
        result = trainer.step((images, labels))
        assert result.applied == (index != BAD)
        clipped += result.grad_norm > trainer.max_grad_norm
    assert clipped
    state = trainer.optimizer.state_dict()["state"]
    assert len(list(state_tensors(trainer.optimizer))) == sum(len(one) for one in state.values())
    return [*trainer.model.state_dict().values(), *state_tensors(trainer.optimizer), torch.rand(1)]
