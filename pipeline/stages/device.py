"""The device a stage computes on, and what must be said or set for it."""

import os
from pathlib import Path

import torch

from pipeline.errors import UserError


def choose_device(name: str) -> torch.device:
    """auto: CUDA where torch finds it. Raises UserError for cuda where there is none."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError(
            "execution.device cuda: torch finds no CUDA device here. Set auto or cpu, or check `nvidia-smi` "
            "and that the installed torch supports this GPU"
        )
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def note_on_precision(precision: str, device: torch.device) -> None:
    """Says what float16 costs on a processor that has to emulate it."""
    if precision == "amp_fp16" and device.type == "cpu" and not _cpu_has_float16():
        print(
            "precision amp_fp16: this CPU has no float16 arithmetic and emulates it, exactly but 10 to 20 "
            "times slower than fp32; for speed set precision to amp_bf16 or fp32"
        )


def _cpu_has_float16() -> bool:
    """Whether the processor's features (Linux) name float16 arithmetic: x86's two, Arm's two."""
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not {"avx512_fp16", "amx_fp16", "fphp", "asimdhp"}.isdisjoint(words)


def set_determinism(deterministic: bool, without: list[str]) -> None:
    """On CUDA: deterministic kernels, or the fastest. On a CPU results do not vary in the first place.

    without: the model's operations that have no deterministic kernel. With any, all that have one use it,
    but for attention, which torch keeps deterministic in its strict mode alone.
    """
    if deterministic:
        # cuBLAS's own condition, see torch's docs
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if without:
            print(
                f"model: CUDA has no deterministic {', '.join(without)}: the last bits of the result may "
                "differ from run to run, and after a resume"
            )
    torch.use_deterministic_algorithms(deterministic, warn_only=bool(without))
    torch.backends.cudnn.benchmark = not deterministic
