"""Autocast and the GradScaler behind one path for fp32, amp_fp16 and amp_bf16.

Mixed precision keeps the float32 master weights where they are, in the model, and lets autocast run the
forward and backward in half precision. float16 has few exponent bits: small gradients would vanish, so
the loss is multiplied by a scale before the backward, the gradients are divided by it afterwards, and a
window whose gradients overflowed is skipped and tried with a smaller scale from then on (Micikevicius et
al., "Mixed Precision Training", 2018). bfloat16 has float32's range and needs no scale.

A disabled autocast and a disabled scaler do nothing, so there is one path for all three. What the step
needs of torch beyond its public methods (GradScaler's scale and tracker as tensors, to be read together with
the norm in one transfer, its record of found infs, `grad_scale` of fused optimizers) is kept in this file.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

AUTOCAST_DTYPES = {"fp32": None, "amp_fp16": torch.float16, "amp_bf16": torch.bfloat16}


@dataclass(frozen=True)
class ScalerSettings:
    """GradScaler's arguments (torch's defaults), and a floor: below `min_scale` a run has collapsed.

    `growth_interval` counts optimizer steps, as the scale is updated once a window.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0


class Precision:
    """How one window is computed: autocast's dtype, and the loss scale with its bookkeeping.

    name: fp32, amp_fp16 or amp_bf16; device: where the model is. scaler: for amp_fp16 alone.
    cache_casts: keep the half-precision copies of the weights over all micro-batches of a window, which
    takes the memory of these copies and saves a cast a micro-batch. Set it to False with activation
    checkpointing on CUDA: what is recomputed in autograd's thread clears the cache of all.
    Raises ValueError for another name, a scaler where none is used, and a device that cannot do it.
    """

    def __init__(
        self,
        name: str,
        device: torch.device | str = "cpu",
        scaler: ScalerSettings | None = None,
        *,
        cache_casts: bool = True,
    ) -> None:
        if name not in AUTOCAST_DTYPES:
            raise ValueError(f"precision {name!r}: choose one of {', '.join(AUTOCAST_DTYPES)}")
        if scaler is not None and name != "amp_fp16":
            raise ValueError(
                f"precision {name} uses no loss scale (it has float32's range): leave `scaler` out, or "
                "choose amp_fp16"
            )
        self.name = name
        self.device = torch.device(device)
        self.settings = scaler or ScalerSettings()
        self.dtype = AUTOCAST_DTYPES[name]
        if self.device.type == "cuda":
            _check_cuda(name)
        self._autocast = torch.autocast(
            self.device.type, self.dtype, enabled=self.dtype is not None, cache_enabled=cache_casts
        )
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

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Around a whole window: the weights do not change inside it, so each is cast once.

        torch drops its casts at the end of the outermost region alone; inside another one they would be
        those of old weights.
        """
        torch.clear_autocast_cache()
        try:
            with self._autocast:
                yield
        finally:
            torch.clear_autocast_cache()

    def seed(self, loss: Tensor, samples: float | Tensor) -> Tensor:
        """What the backward of each micro-batch starts from: the loss scale over the window's samples.

        The same bits as the backward of `scaler.scale(loss / samples)`, without its two operations.
        """
        scale = self.scaler._scale if self.scales else torch.ones((), device=loss.device)
        assert scale is not None
        return (scale.to(loss.dtype) / samples).to(loss.dtype)

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        """Adds the gradients of `loss` times `seed` to `.grad`, in the dtypes that the forward had."""
        torch.set_autocast_enabled(self.device.type, False)
        try:
            loss.backward(seed)
        finally:
            torch.set_autocast_enabled(self.device.type, self.dtype is not None)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, once, at the window's end."""
        self.scaler.unscale_(optimizer)

    def scale_and_tracker(self) -> list[Tensor]:
        """The loss scale and the growth tracker as they stand, 0-dim, on the device; [] without a scaler."""
        if not self.scales:
            return []
        scale, tracker = self.scaler._scale, self.scaler._growth_tracker
        assert scale is not None
        assert tracker is not None
        return [scale, tracker]

    def apply(self, optimizer: torch.optim.Optimizer, gradients: list[Tensor], factor: float) -> None:
        """The optimizer's step with the gradients times `factor`; they may be multiplied in place.

        A fused optimizer reads each gradient once anyway and divides by `grad_scale` as it goes (it is how
        GradScaler unscales), so there the factor costs nothing. `grad_scale` is a float32.
        """
        if factor == 1.0:
            optimizer.step()
        elif _is_fused(optimizer) and all(gradient.dtype == torch.float32 for gradient in gradients):
            optimizer.grad_scale = torch.full((), 1.0 / factor, device=gradients[0].device)  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale  # type: ignore[attr-defined]
        else:
            torch._foreach_mul_(gradients, factor)
            optimizer.step()

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
        """The scale, its tracker and its settings; empty without a scaler."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts the scale and its tracker back, into tensors on the device; the settings stay its own.

        torch's own `load_state_dict` keeps the numbers aside while the scaler has not been used, and takes
        the settings over as well: those are read from params, and may be changed on purpose.
        """
        if not self.scales:
            return
        for tensor, name in zip(self.scale_and_tracker(), ("scale", "_growth_tracker"), strict=True):
            tensor.fill_(state[name])


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every group takes the fused path, whose kernels know `grad_scale`."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _check_cuda(name: str) -> None:
    if not torch.cuda.is_available():
        raise ValueError("device cuda: torch finds no CUDA device here; use device cpu")
    if name == "amp_bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            "precision amp_bf16: this GPU has no bfloat16 (it came with the Ampere generation); use amp_fp16"
        )
