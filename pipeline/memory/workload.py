"""What training takes for each kind of torchvision's models: a window, a forward and a loss.

Only classifiers are trained here, but whatever can be described so can be traced and planned. The kinds are
torchvision's own: `torchvision.models.list_models(module=…)` lists those of `models`, `models.segmentation`
and `models.video`. Who knows torchvision asks it; this file needs torch alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.engine import CrossEntropy

CHANNELS = 3
FRAMES = 16  # what mvit is built for; s3d needs 14 at least
AUXILIARY = 0.5  # weight of the second head's loss, references/segmentation/train.py of torchvision
UNLABELLED = 255  # in label maps, in the same place

# Beginnings of names of models that need another size than their kind: by construction, or too deep for less.
OWN_PIXELS = {"inception_v3": 299, "mvit": 224, "swin3d": 224, "s3d": 224}


def per_sample(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int | Tensor]:
    """Cross entropy of logits (N, classes); items are samples."""
    return CrossEntropy()(outputs, labels)


def per_pixel(outputs: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, int | Tensor]:
    """Cross entropy of logits (N, classes, H, W) on "out", plus half of that on "aux" where there is one.

    Items are labelled pixels, so that both terms are means over the same pixels.
    """
    criterion = CrossEntropy(ignore_index=UNLABELLED)
    total, count = criterion(outputs["out"], labels)
    if "aux" in outputs:
        total = total + AUXILIARY * criterion(outputs["aux"], labels)[0]
    return total, count


@dataclass(frozen=True)
class Workload:
    """A kind of models: how its samples look, and its loss in the engine's form."""

    kind: str
    pixels: int  # of a square image or frame, for most models of the kind
    loss: Callable[[Any, Tensor], tuple[Tensor, int | Tensor]]
    frames: int = 0  # of a clip; 0 where a sample is an image
    label_maps: bool = False  # a label for each pixel, else one for each sample

    def pixels_of(self, model: str) -> int:
        """The size for a model by its torchvision name."""
        return next((size for start, size in OWN_PIXELS.items() if model.startswith(start)), self.pixels)

    def window(
        self, samples: int, pixels: int, *, dtype: torch.dtype = torch.uint8, device: str = "cpu"
    ) -> tuple[Tensor, Tensor]:
        """Blank images (N, 3, S, S) or clips (N, 3, frames, S, S), and labels (N,) or (N, S, S), int64."""
        frames = (self.frames,) if self.frames else ()
        labelled = (pixels, pixels) if self.label_maps else ()
        return (
            torch.zeros(samples, CHANNELS, *frames, pixels, pixels, dtype=dtype, device=device),
            torch.zeros(samples, *labelled, dtype=torch.int64, device=device),
        )

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
        """For engine.Trainer: outputs and labels. Whole numbers become float32 in 0..1, on the device."""
        pixels, labels = batch
        return model(pixels if pixels.is_floating_point() else pixels.float() / 255), labels


CLASSIFICATION = Workload("classification", 224, per_sample)
SEGMENTATION = Workload("segmentation", 480, per_pixel, label_maps=True)  # the references' crop
VIDEO = Workload("video", 112, per_sample, frames=FRAMES)
WORKLOADS = {one.kind: one for one in (CLASSIFICATION, SEGMENTATION, VIDEO)}
