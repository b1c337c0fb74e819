"""Windows, forwards and losses of the kinds of models: by hand, and traced."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.engine import Precision, Trainer, allocate_state, build_optimizer
from pipeline.memory.trace import count_step, trace_step, without_memory
from pipeline.memory.workload import CLASSIFICATION, SEGMENTATION, UNLABELLED, VIDEO, WORKLOADS, Workload

CLASSES = 5
PIXELS = 16


class Segmenter(nn.Module):
    """A backbone of half the size and two heads, whose outputs torchvision's models name so."""

    def __init__(self, auxiliary: bool = True) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.out, self.aux = nn.Conv2d(8, CLASSES, 1), nn.Conv2d(8, CLASSES, 1) if auxiliary else None

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        features = self.backbone(images)
        heads = {"out": self.out, "aux": self.aux} if self.aux else {"out": self.out}
        size = images.shape[-2:]
        return {name: F.interpolate(head(features), size, mode="bilinear") for name, head in heads.items()}


def video_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(3, 8, 3, 2, 1),
        nn.BatchNorm3d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


def trainer(workload: Workload, model: nn.Module, precision: str) -> Trainer:
    optimizer = build_optimizer(model.train(), "adamw", lr=1e-3)
    allocate_state(optimizer)
    return Trainer(
        model,
        optimizer,
        workload.loss,
        precision=Precision(precision),
        micro_batch_size=2,
        forward=workload.forward,
    )


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.uint8), ("amp_bf16", torch.float32)])
@pytest.mark.parametrize(("workload", "build"), [(SEGMENTATION, Segmenter), (VIDEO, video_net)])
def test_the_fake_trace_is_the_real_ledger(
    workload: Workload, build: Callable[[], nn.Module], precision: str, dtype: torch.dtype
) -> None:
    window = workload.window(4, PIXELS, dtype=dtype)
    real = count_step(trainer(workload, build(), precision), window)
    fake = trace_step(
        lambda: (
            trainer(workload, without_memory(build), precision),
            workload.window(4, PIXELS, dtype=dtype),
        ),
        cuda=False,
    )
    assert fake.peak.total == pytest.approx(real.peak.total, rel=0.002)
    assert fake.peak.components["inputs"] == sum(tensor.nbytes for tensor in window)


def test_a_windows_shapes() -> None:
    shapes = {
        kind: [tuple(tensor.shape) for tensor in one.window(2, PIXELS)] for kind, one in WORKLOADS.items()
    }
    assert shapes == {
        "classification": [(2, 3, 16, 16), (2,)],
        "segmentation": [(2, 3, 16, 16), (2, 16, 16)],
        "video": [(2, 3, 16, 16, 16), (2,)],
    }
    pixels, labels = CLASSIFICATION.window(2, PIXELS)
    assert (pixels.dtype, labels.dtype) == (torch.uint8, torch.int64)


@pytest.mark.parametrize(
    ("workload", "model", "pixels"),
    [
        (CLASSIFICATION, "resnet50", 224),
        (CLASSIFICATION, "inception_v3", 299),
        (SEGMENTATION, "fcn_resnet50", 480),
        (VIDEO, "r3d_18", 112),
        (VIDEO, "mvit_v2_s", 224),
        (VIDEO, "s3d", 224),
    ],
)
def test_the_size_of_a_models_images(workload: Workload, model: str, pixels: int) -> None:
    assert workload.pixels_of(model) == pixels


@pytest.mark.parametrize("auxiliary", [True, False])
def test_segmentations_loss_over_a_window_is_that_of_torchvisions_reference(auxiliary: bool) -> None:
    torch.manual_seed(0)
    model = Segmenter(auxiliary)
    images = torch.rand(4, 3, PIXELS, PIXELS)
    labels = torch.randint(0, CLASSES, (4, PIXELS, PIXELS))
    labels[0, :5] = UNLABELLED  # micro-batches with different counts of pixels
    with torch.no_grad():
        parts = [model.train()(half) for half in images.split(2)]  # BatchNorm sees micro-batches
        outputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        expected = F.cross_entropy(outputs["out"], labels, ignore_index=255)
        if auxiliary:
            expected = expected + 0.5 * F.cross_entropy(outputs["aux"], labels, ignore_index=255)
    result = trainer(SEGMENTATION, model, "fp32").step((images, labels))
    assert result.loss == pytest.approx(expected.item(), rel=1e-6)


def test_a_videos_loss_over_a_window_is_the_mean_over_clips() -> None:
    torch.manual_seed(0)
    model = video_net()
    clips, labels = torch.rand(4, 3, 16, PIXELS, PIXELS), torch.randint(0, CLASSES, (4,))
    with torch.no_grad():
        logits = torch.cat([model.train()(half) for half in clips.split(2)])
    result = trainer(VIDEO, model, "fp32").step((clips, labels))
    assert result.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)


def test_whole_numbers_become_floats_between_0_and_1() -> None:
    pixels = torch.tensor([[0, 255]], dtype=torch.uint8)
    outputs, _ = CLASSIFICATION.forward(nn.Identity(), (pixels, torch.zeros(1)))
    assert outputs.tolist() == [[0.0, 1.0]]
