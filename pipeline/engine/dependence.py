"""What makes a model's result depend on how a window is split into micro-batches.

Three things do, by nature: batch statistics are those of a micro-batch, and the masks of dropout and of
stochastic depth are drawn per micro-batch. All else changes nothing but rounding.
"""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd


def depends_on_split(model: nn.Module) -> list[str]:
    """The kinds found in `model`, of "batch statistics", "dropout", "stochastic depth"; none is [].

    Modules are looked at: a call of torch.nn.functional.dropout inside a forward cannot be seen.
    """
    kinds = {kind for module in model.modules() if (kind := _kind(module))}
    return sorted(kinds)


def _kind(module: nn.Module) -> str | None:
    name = type(module).__name__
    if isinstance(module, _BatchNorm):
        return "batch statistics"
    if isinstance(module, _DropoutNd) and module.p > 0:
        return "dropout"
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0:
        return "dropout"
    if name in ("StochasticDepth", "DropPath"):  # torchvision's; timm's
        rate = getattr(module, "p", getattr(module, "drop_prob", 0.0))
        return "stochastic depth" if rate else None
    return None
