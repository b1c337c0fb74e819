"""Small models and windows for the engine's tests."""

import torch
from torch import nn

from pipeline.engine import CrossEntropy, Precision, ScalerSettings, Trainer

CLASSES = 5


def net(seed: int = 0, *, batchnorm: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small convolutional classifier of (N, 2, 6, 6) images; GroupNorm unless BatchNorm is wanted."""
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d(8) if batchnorm else nn.GroupNorm(4, 8)
    layers = [nn.Conv2d(2, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(128, CLASSES)]
    model = nn.Sequential(*layers)
    return model if dtype == torch.float32 else model.to(dtype)


def window(
    samples: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(samples, 2, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
    return images, torch.randint(0, CLASSES, (samples,), generator=generator)


def trainer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    precision: str = "fp32",
    micro: int = 4,
    scale: float = 1024.0,
    growth_interval: int = 3,
    min_scale: float = 2.0**-20,
    max_consecutive_skips: int = 1000,
    **options: object,
) -> Trainer:
    settings = ScalerSettings(init_scale=scale, growth_interval=growth_interval, min_scale=min_scale)
    return Trainer(
        model,
        optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        options.pop("loss", CrossEntropy()),  # type: ignore[arg-type]
        precision=Precision(precision, "cpu", settings if precision == "amp_fp16" else None),
        micro_batch_size=micro,
        max_consecutive_skips=max_consecutive_skips,
        **options,  # type: ignore[arg-type]
    )


def gradients_of(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], micro: int
) -> tuple[list[torch.Tensor], float]:
    """The gradients that a step hands to the optimizer, and the loss it reports."""
    seen: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: seen.extend(p.grad.clone() for p in model.parameters())
    )
    result = trainer(model, optimizer, micro=micro).step(batch)
    assert result.applied
    return seen, result.loss


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The relative 2-norm of the difference, computed in float64."""
    first = torch.cat([tensor.double().flatten() for tensor in a])
    second = torch.cat([tensor.double().flatten() for tensor in b])
    return float((first - second).norm() / second.norm())


def copies(tensors: object) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]  # type: ignore[attr-defined]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Bit for bit, NaN equal to NaN."""
    return len(a) == len(b) and all(
        torch.equal(torch.nan_to_num(x, nan=7e7), torch.nan_to_num(y, nan=7e7))
        for x, y in zip(a, b, strict=True)
    )
