"""Autocast and the GradScaler behind one path for fp32, amp_fp16 and amp_bf16.

Mixed precision keeps the float32 master weights where they are, in the model, and lets autocast run the
forward and backward in half precision. float16 has few exponent bits: small gradients would vanish, so
the loss is multiplied by a scale before the backward, the gradients are divided by it afterwards, and a
window whose gradients overflowed is skipped and tried with a smaller scale from then on (Micikevicius et
al., "Mixed Precision Training", 2018). bfloat16 has float32's range and needs no scale.

A disabled autocast and a disabled scaler do nothing, so there is one path for all three. What the step
needs of GradScaler beyond its public methods (its scale and tracker as tensors, to be read together with
the norm in one transfer; its record of found infs) is kept in this file.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

AUTOCAST_DTYPES = {"fp32": None, "amp_fp16": torch.float16, "amp_bf16": torch.bfloat16}


@dataclass(frozen=True)
class ScalerSettings:
    """GradScaler's arguments (torch's defaults), and the limits past which a run has collapsed.

    `growth_interval` counts optimizer steps, as `update` is called once a window. Under `min_scale`, or
    after `max_consecutive_skips` windows without an update, `Trainer.step` raises `CollapseError`.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_consecutive_skips: int = 50


class Precision:
    """How one window is computed: autocast's dtype, and the loss scale with its bookkeeping.

    `name` is fp32, amp_fp16 or amp_bf16; `device` where the model is. Raises ValueError for another name
    and for a CUDA device that cannot do what is asked.
    """

    def __init__(
        self, name: str, device: torch.device | str = "cpu", scaler: ScalerSettings | None = None
    ) -> None:
        if name not in AUTOCAST_DTYPES:
            raise ValueError(f"precision {name!r}: choose one of {', '.join(AUTOCAST_DTYPES)}")
        self.name = name
        self.device = torch.device(device)
        self.settings = scaler or ScalerSettings()
        self.dtype = AUTOCAST_DTYPES[name]
        if self.device.type == "cuda":
            _check_cuda(name)
        self.scaler = GradScaler(
            self.device.type,
            init_scale=self.settings.init_scale,
            growth_factor=self.settings.growth_factor,
            backoff_factor=self.settings.backoff_factor,
            growth_interval=self.settings.growth_interval,
            enabled=name == "amp_fp16",
        )
        if self.scales:  # makes the scale's tensors now rather than at the first loss
            self.scaler.scale(torch.zeros((), device=self.device))

    @property
    def scales(self) -> bool:
        """Whether a loss scale is in use (amp_fp16 alone)."""
        return self.scaler.is_enabled()

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of the scaled loss to `.grad`. `loss`: a float32 (or float64) scalar."""
        self.scaler.scale(loss).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, once, at the window's end."""
        self.scaler.unscale_(optimizer)

    def scale_and_tracker(self) -> list[Tensor]:
        """The loss scale and the growth tracker as they stand, 0-dim float32, without reading the device."""
        if not self.scales:
            return [torch.ones((), device=self.device), torch.zeros((), device=self.device)]
        scale, tracker = self.scaler._scale, self.scaler._growth_tracker
        assert scale is not None
        assert tracker is not None
        return [scale, tracker.float()]

    def update(self, optimizer: torch.optim.Optimizer, *, applied: bool) -> None:
        """Moves the scale: back off after a window that was not applied, count a clean one.

        `applied` is the step's one decision. It is stricter than the scaler's own finding (finite
        gradients can have a norm past float32), so the scaler is told.
        """
        if not self.scales:
            return
        found = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for tensor in found.values():
            tensor.fill_(0.0 if applied else 1.0)
        self.scaler.update()

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """After a window without anything to learn from: the scale and its tracker stay as they are."""
        if self.scales:
            self.scaler._per_optimizer_states.pop(id(optimizer), None)

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()


def _check_cuda(name: str) -> None:
    if not torch.cuda.is_available():
        raise ValueError("device cuda: torch finds no CUDA device here; use device cpu")
    if name == "amp_bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            "precision amp_bf16: this GPU has no bfloat16 (it came with the Ampere generation); use amp_fp16"
        )
