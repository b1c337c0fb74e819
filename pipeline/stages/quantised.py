"""AdamW with its moments in 8 or 4 bits, of torchao: less state, and not the same training.

A moment's elements share a scale in blocks of 256 (8 bits) or 128 (4 bits), so that a parameter's state takes
2.04 or 1.07 bytes instead of 8; tensors under 4,096 elements keep float32 (Dettmers et al., "8-bit Optimizers
via Block-wise Quantization", 2022). What is learned differs a little: it is asked for, and no plan takes it.
"""

from typing import Any

import torch

from pipeline.errors import UserError

BYTES = {32: 8.0, 8: 2.04, 4: 1.07}  # of state a parameter, for both moments


def quantised_adamw(groups: list[dict[str, Any]], *, lr: float, bits: int) -> torch.optim.Optimizer:
    """Raises UserError where torchao is not installed."""
    try:
        from torchao.optim import AdamW4bit, AdamW8bit
    except ImportError:
        raise UserError(
            f"optimizer.state_bits {bits} needs torchao, which is not installed: pip install "
            "-c requirements-dev.txt torchao (or `pip install .[state-bits]`), or set 32"
        ) from None
    optimizer: torch.optim.Optimizer = (AdamW8bit if bits == 8 else AdamW4bit)(groups, lr=lr)
    if groups[0]["params"][0].device.type != "cuda":
        _run_uncompiled(optimizer)
    return optimizer


def _run_uncompiled(optimizer: torch.optim.Optimizer) -> None:
    """torchao compiles the update of each shape: minutes on a CPU, for which eager kernels are as good."""
    plain = optimizer.step

    def step(closure: Any = None) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return plain(closure)

    optimizer.step = step  # type: ignore[method-assign]
