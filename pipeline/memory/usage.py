"""Memory measured while training: exact bytes by component, and the peaks that the machine saw.

On CUDA the allocator has two peaks: *allocated*, the bytes that tensors held, and *reserved*, the bytes
that the allocator took from the device for them. On a CPU there is the peak resident set of the process.
"""

import resource
import sys

import torch
from torch import nn

from pipeline.engine import state_tensors

MIB = 1024**2


def components(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """MiB that training holds throughout: parameters (and buffers), gradients, optimizer state.

    Gradients are counted where a parameter is trained, though they live within a window alone.
    """
    parameters = [*model.parameters(), *model.buffers()]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {
        "parameters_mib": sum(tensor.nbytes for tensor in parameters) / MIB,
        "gradients_mib": sum(parameter.nbytes for parameter in trained) / MIB,
        "optimizer_state_mib": sum(tensor.nbytes for tensor in state_tensors(optimizer)) / MIB,
    }


def peaks(device: torch.device) -> dict[str, float]:
    """MiB at the highest point: of the device since the last call, of the host since the process began."""
    measured = {"host_peak_rss_mib": _peak_resident_bytes() / MIB}
    if device.type == "cuda":
        measured["peak_allocated_mib"] = torch.cuda.max_memory_allocated(device) / MIB
        measured["peak_reserved_mib"] = torch.cuda.max_memory_reserved(device) / MIB
        torch.cuda.reset_peak_memory_stats(device)
    return measured


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # getrusage(2): kilobytes on Linux
