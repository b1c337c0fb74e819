"""What a device has free, and what it takes besides tensors."""

import psutil
import torch

from pipeline.memory.prediction import CPU_RATES, CUDA, MIB, Device

GIB = 2**30
LOADED_LATER = 200 * MIB  # by a training after its plan: MLflow, matplotlib, oneDNN's kernels; measured
MARGIN_GIB = {"cuda": 0.25, "cpu": 1.0}  # left to others: a desktop, a notebook, the page cache


def describe(device: torch.device) -> Device:
    """This process's share of the device before it trains: measured where it can be, else assumed."""
    if device.type == "cpu":
        process = psutil.Process().memory_info().rss
        return Device("cpu", False, process + LOADED_LATER, 0, CPU_RATES, process)
    torch.zeros(1, device=device)  # makes the context
    free, total = torch.cuda.mem_get_info(device)
    context = max(0, min(total - free - torch.cuda.memory_reserved(device), 2 * CUDA.context_bytes))
    name = torch.cuda.get_device_name(device)
    return Device(name, True, context, CUDA.workspace_bytes, CUDA.rates, context)


def budget(device: torch.device, described: Device) -> int:
    """Bytes that this process may take in all, in whole GiB so that two runs decide alike, less a margin.

    described: the device as `describe` gives it; what of it is taken already is part of the budget.
    """
    on_host = device.type == "cpu"
    free = psutil.virtual_memory().available if on_host else torch.cuda.mem_get_info(device)[0]
    free += described.taken_bytes
    whole = free // GIB or free / GIB
    return max(0, round((whole - MARGIN_GIB[device.type]) * GIB))


def in_mib(size: float) -> str:
    mib = size / MIB
    return f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:,.1f} MiB"
