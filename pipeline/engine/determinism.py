"""What has no deterministic implementation on CUDA, found before a model gets there."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# The list in the documentation of torch.use_deterministic_algorithms (2.14), by the operation that is
# dispatched. Without `bilinear` and its kin: interpolate takes another way for them in deterministic mode.
NONDETERMINISTIC = {
    "avg_pool3d_backward": "AvgPool3d",
    "_adaptive_avg_pool2d_backward": "AdaptiveAvgPool2d",
    "_adaptive_avg_pool3d_backward": "AdaptiveAvgPool3d",
    "adaptive_max_pool2d_backward": "AdaptiveMaxPool2d",
    "fractional_max_pool2d_backward": "FractionalMaxPool2d",
    "fractional_max_pool3d_backward": "FractionalMaxPool3d",
    "max_unpool2d": "MaxUnpool2d",
    "max_unpool3d": "MaxUnpool3d",
    "upsample_bicubic2d_backward": "interpolate (bicubic)",
    "_upsample_bilinear2d_aa_backward": "interpolate (bilinear, antialias)",
    "_upsample_bicubic2d_aa_backward": "interpolate (bicubic, antialias)",
    "reflection_pad1d_backward": "ReflectionPad1d",
    "reflection_pad2d_backward": "ReflectionPad2d",
    "reflection_pad3d_backward": "ReflectionPad3d",
    "nll_loss2d_forward": "NLLLoss of images",
    "_ctc_loss_backward": "CTCLoss",
    "_embedding_bag_backward": "EmbeddingBag",
    "put": "put",
    "put_": "put",
    "histc": "histc",
    "bincount": "bincount",
    "median": "median",
    "grid_sampler_2d_backward": "grid_sample",
    "grid_sampler_3d_backward": "grid_sample",
}


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function.name().removeprefix("aten::").partition(".")[0])
        return function(*args, **(kwargs or {}))


def nondeterministic(run: Callable[[], object]) -> list[str]:
    """The kinds of operation in `run`, a forward and backward, that CUDA has no deterministic kernel for.

    It may run on the CPU or on meta tensors: the operations are those of the model, wherever it is.
    """
    with _Seen() as seen:
        run()
    return sorted({NONDETERMINISTIC[name] for name in seen.names & NONDETERMINISTIC.keys()})
