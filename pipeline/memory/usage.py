"""Memory measured while training: bytes by component, and the peaks that the machine saw.

On CUDA the allocator has two peaks, *allocated*, the bytes that tensors held, and *reserved*, the bytes that
it took from the device for them; the device itself says what all processes took of it. On a CPU there is the
peak resident set of the process, and what tensors held is known where a ledger counted it.

A ledger looks at every operation, so it counts few windows: the first one that is applied, and the first
after a change of micro-batch.
"""

import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from pipeline.engine import StepResult, Trainer, state_tensors
from pipeline.engine.window import Batch
from pipeline.memory.ledger import Peak
from pipeline.memory.prediction import Prediction
from pipeline.memory.trace import counting

MIB = 1024**2
LOGGED = ("activations", "cast_weights", "temporaries")  # what nothing but a count can tell


@dataclass(frozen=True)
class Measured:
    """One window, counted, in bytes."""

    micro_batch_size: int
    peak: Peak
    highest: dict[str, int]  # of each component, whenever that was
    host: int  # kept in the host's memory by savers


class Meter:
    """Takes the steps of a training, and counts the memory of those that tell something new."""

    def __init__(self, trainer: Trainer, step: Callable[[Batch], StepResult]) -> None:
        self.measured: Measured | None = None
        self._trainer = trainer
        self._step = step
        self._counted_at = 0  # the micro-batch of the window that was counted and applied

    def step(self, window: Batch) -> StepResult:
        """As the step that it was given."""
        size = self._trainer.micro_batch_size
        if size == self._counted_at:
            return self._step(window)
        with counting(self._trainer, window) as ledger:
            result = self._step(window)
        if result.micro_batch_size == size:  # else it ran out of memory: the next window tells more
            self.measured = Measured(size, ledger.peak, ledger.highest, ledger.host_peak)
            self._counted_at = size if result.applied else 0  # a skipped one has no update
        return result

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training need not count again."""
        return {"counted_at": self._counted_at, "measured": asdict(self.measured) if self.measured else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counted_at = state["counted_at"]
        if values := state["measured"]:
            self.measured = Measured(**{**values, "peak": Peak(**values["peak"])})

    def logged(self) -> dict[str, float]:
        """MiB of what only a count can tell; of the last window that was counted."""
        if self.measured is None:
            return {}
        highest = {f"{name}_mib": self.measured.highest[name] / MIB for name in LOGGED}
        on_cpu = self._trainer.precision.device.type == "cpu"
        tensors = {"peak_allocated_mib": self.measured.peak.total / MIB} if on_cpu else {}
        return highest | tensors


def prediction_error(
    prediction: Prediction, measured: Measured | None, device_peaks: dict[str, float]
) -> dict[str, float]:
    """Predicted over measured, less 1; of what tensors held, and on CUDA of what was reserved for them.

    device_peaks: the highest values of `peaks` in this training. Nothing where the two are not of one
    micro-batch.
    """
    if measured is None or measured.micro_batch_size != prediction.micro_batch_size:
        return {}
    if "peak_reserved_mib" not in device_peaks:
        return {"prediction_error": prediction.allocated / (measured.peak.total + measured.host) - 1}
    return {
        "prediction_error": prediction.allocated / MIB / device_peaks["peak_allocated_mib"] - 1,
        "prediction_error_reserved": prediction.reserved / MIB / device_peaks["peak_reserved_mib"] - 1,
    }


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
        free, total = torch.cuda.mem_get_info(device)
        measured["device_used_mib"] = (total - free) / MIB  # by all processes, right now
        torch.cuda.reset_peak_memory_stats(device)
    return measured


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # getrusage(2): kilobytes on Linux
