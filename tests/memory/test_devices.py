"""What is free and what is taken, on a CPU as it is and on a GPU that says so."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from pipeline.memory import devices
from pipeline.memory.devices import GIB
from pipeline.memory.prediction import MIB

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_the_budget_of_a_cpu_is_what_is_free_and_what_this_process_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the process has already is in the prediction, so it must be in the budget as well."""
    memory = SimpleNamespace(available=round(6.5 * GIB))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    described = devices.describe(CPU)
    assert 100 * MIB < described.taken_bytes < described.context_bytes
    whole = (memory.available + described.taken_bytes) // GIB
    assert devices.budget(CPU, described) == (whole - 1) * GIB
    memory.available += 10 * MIB
    assert devices.budget(CPU, described) == (whole - 1) * GIB, "two runs decide alike"


def test_the_context_of_a_gpu_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    total, context = 8 * GIB, 400 * MIB
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - context, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    described = devices.describe(GPU)
    assert described.context_bytes == described.taken_bytes == context
    assert devices.budget(GPU, described) == total - GIB // 4


def test_a_gpu_with_less_than_a_gib_free_still_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB // 2, 8 * GIB))
    described = devices.describe(CPU)  # with nothing taken on the GPU
    nothing = type(described)("a card", True, 0, 0, described.rates)
    assert devices.budget(GPU, nothing) == GIB // 4
