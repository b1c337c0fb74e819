"""Models and the micro-batches they are trained on, for the benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline import models

CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """`build` makes the model, its weights drawn from a fixed seed; `shape` is that of one micro-batch."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().train()

    def micro_batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(0, CLASSES, self.shape[:1], generator=generator)
        return torch.randn(self.shape, generator=generator), labels


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=CLASSES)


def small_vit() -> nn.Module:
    """Six layers of width 192 on 8 x 8 patches: 2.7 M parameters."""
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(64, 8, 6, 6, 192, 768, num_classes=CLASSES)


WORKLOADS = {
    "costless": Workload(lambda: nn.Linear(8, CLASSES), (8, 8)),
    "small_cnn 32 px x 16": Workload(lambda: models.small_cnn(CLASSES, 3), (16, 3, 32, 32)),
    "resnet18 64 px x 2": Workload(resnet18, (2, 3, 64, 64)),
    "resnet18 64 px x 8": Workload(resnet18, (8, 3, 64, 64)),
    "vit 64 px x 8": Workload(small_vit, (8, 3, 64, 64)),
}
