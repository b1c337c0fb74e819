"""Out of memory is survived exactly: the oracle is the window begun at the final size from the same state."""

import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nets import copies, distance, equal, gradients_of, net, trainer, window
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.engine import DoesNotFitError, Recovery, Trainer, WeightAverage, allocate_state, state_tensors
from pipeline.engine.out_of_memory import TEXTS, is_out_of_memory
from pipeline.memory.ledger import Ledger


class Budget(Ledger):
    """A device of so many bytes: what would exceed them is refused, as the allocator refuses it."""

    def __init__(self, budget: int) -> None:
        super().__init__()
        self.budget = budget
        self.refused = 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        results = super().__torch_dispatch__(operation, types, arguments, options)
        if self.total > self.budget:
            self.refused += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate in {operation}")
        return results


def noisy() -> nn.Module:
    """With dropout and BatchNorm: what a careless retry would get wrong."""
    model = net(batchnorm=True)
    model.insert(3, nn.Dropout(0.3))
    return model


def stepper(precision: str = "fp32", *, micro: int, model: nn.Module | None = None) -> Trainer:
    model = model or noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    allocate_state(optimizer)
    return trainer(
        model,
        optimizer,
        precision=precision,
        micro=micro,
        max_grad_norm=0.1,
        average=WeightAverage(model, 0.9),
    )


def everything(step_taker: Trainer) -> list[Tensor]:
    scaler = step_taker.precision.scaler.state_dict()
    return [
        *copies(step_taker.model.state_dict().values()),
        *copies(state_tensors(step_taker.optimizer)),
        *copies(step_taker.average.averages),
        torch.tensor([float(value) for value in (scaler or {}).values()]),
        torch.get_rng_state(),
    ]


def failing(step_taker: Trainer, where: str, error: Callable[[], BaseException], above: int) -> None:
    """Lets the second micro-batch of more than `above` samples fail, forward or backward."""
    forward, backward = step_taker.forward, step_taker.precision.backward
    size = calls = 0

    def failing_forward(model: nn.Module, batch: Any) -> Any:
        nonlocal size, calls
        size, calls = len(batch[0]), calls + 1
        outputs = forward(model, batch)  # draws its masks, moves its statistics
        if where == "forward" and size > above and calls > 1:
            calls = 0
            raise error()
        return outputs

    def failing_backward(loss: Tensor, seed: Tensor) -> None:
        nonlocal calls
        backward(loss, seed)  # leaves gradients behind
        if where == "backward" and size > above and calls > 1:
            calls = 0
            raise error()

    step_taker.forward = failing_forward
    step_taker.precision.backward = failing_backward  # type: ignore[method-assign]


def out_of_memory() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
@pytest.mark.parametrize(("above", "final"), [(6, 5), (3, 2)])  # 20 -> 10 -> 5 -> 2
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_window_is_that_of_one_begun_at_the_final_size(
    where: str, above: int, final: int, precision: str
) -> None:
    """Once and several times in a row; the windows before and after are ordinary ones."""
    survivor, oracle = stepper(precision, micro=64), stepper(precision, micro=64)
    results = []
    for one in (survivor, oracle):
        torch.manual_seed(5)
        recovery = Recovery(one)
        recovery.step(window(20, seed=1))
        if one is survivor:
            failing(one, where, out_of_memory, above)
            one.micro_batch_size = 10  # so that a second micro-batch is there to fail
        else:
            one.micro_batch_size = final
        results.append([recovery.step(window(20, seed=2)), recovery.step(window(13, seed=3))])
        results[-1].append(everything(one))
        assert recovery.retries == (0 if one is oracle else {5: 1, 2: 2}[final])
        assert one.micro_batch_size == final, "kept for all that follow"
    for ours, theirs in zip(results[0][:2], results[1][:2], strict=True):
        assert (ours.loss, ours.grad_norm, ours.applied) == (theirs.loss, theirs.grad_norm, theirs.applied)
        assert ours.samples == theirs.samples, "every sample counts once"
    assert equal(results[0][2], results[1][2])


def test_half_is_of_what_ran_and_not_of_what_was_allowed() -> None:
    """20 samples at a micro-batch of 64 ran as 20."""
    one = stepper(micro=64)
    sizes = []
    forward = one.forward

    def too_large(model: nn.Module, batch: Any) -> Any:
        sizes.append(len(batch[0]))
        if sizes[-1] > 5:
            raise out_of_memory()
        return forward(model, batch)

    one.forward = too_large
    Recovery(one).step(window(20))
    assert sizes == [20, 10, 5, 5, 5, 5]


def test_a_byte_budget_is_met_and_the_gradients_are_those_of_the_whole_window() -> None:
    """Report 41: a retry that split the already split batch lost samples."""
    batch = window(32)
    whole, _ = gradients_of(net(), batch, 32)
    one = trainer(net(), torch.optim.SGD(net().parameters(), lr=0.0), micro=32)
    seen: list[Tensor] = []
    optimizer = torch.optim.SGD(one.model.parameters(), lr=0.0)
    one = trainer(one.model, optimizer, micro=32)
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(copies(parameter.grad for parameter in one.model.parameters()))
    )
    recovery = Recovery(one)
    with Budget(45_000) as device:
        device.know("parameters", one.model.parameters())
        result = recovery.step(batch)
    assert device.refused == recovery.retries >= 2
    assert result.samples == 32
    assert distance(seen, whole) < 1e-6


def test_nothing_of_the_failed_attempt_is_alive_at_the_retry() -> None:
    one = stepper(micro=8)
    alive: list[weakref.ref[Tensor]] = []
    forward = one.forward
    left: list[bool] = []

    def remembered(model: nn.Module, batch: Any) -> Any:
        outputs, labels = forward(model, batch)
        if len(batch[0]) > 4:
            alive.append(weakref.ref(outputs))
            raise out_of_memory()
        left.extend(reference() is not None for reference in alive)
        left.extend(parameter.grad is not None for parameter in model.parameters() if len(left) == 1)
        return outputs, labels

    one.forward = remembered
    Recovery(one).step(window(8))
    assert alive
    assert not any(left[:6])


def test_at_micro_batch_1_the_original_error_is_told() -> None:
    one = stepper(micro=1, model=net())

    def never(model: nn.Module, batch: Any) -> Any:
        raise out_of_memory()

    one.forward = never
    with pytest.raises(DoesNotFitError, match=r"at micro-batch 1.*Tried to allocate 2.00 GiB") as caught:
        Recovery(one).step(window(4))
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_in_the_update_nothing_is_replayed() -> None:
    one = stepper(micro=4)
    calls = 0

    def halfway(*_: Any) -> None:
        nonlocal calls
        calls += 1
        with torch.no_grad():
            next(iter(one.model.parameters())).add_(1)
        raise out_of_memory()

    one.optimizer.register_step_pre_hook(halfway)
    with pytest.raises(DoesNotFitError, match="in the optimizer's update: weights have moved"):
        Recovery(one).step(window(8))
    assert calls == 1
    assert one.micro_batch_size == 4


@pytest.mark.parametrize("text", TEXTS)
def test_each_text_of_a_backend_is_retried(text: str) -> None:
    one = stepper(micro=10)
    failing(one, "backward", lambda: RuntimeError(f"{text} when calling `something(handle)`"), above=5)
    recovery = Recovery(one)
    assert recovery.step(window(20)).applied
    assert recovery.retries == 1


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("CUDA out of memory"),  # of no backend
        KeyError("labels"),
    ],
)
def test_other_errors_pass(error: Exception) -> None:
    one = stepper(micro=10)
    failing(one, "forward", lambda: error, above=0)
    recovery = Recovery(one)
    with pytest.raises(type(error)):
        recovery.step(window(20))
    assert recovery.retries == 0
    assert not is_out_of_memory(error)


def test_a_real_failure_of_the_cpu_allocator_is_survived() -> None:
    """An allocation that no machine can make, for micro-batches of more than 4."""
    one = stepper(micro=16)
    forward = one.forward

    def greedy(model: nn.Module, batch: Any) -> Any:
        if len(batch[0]) > 4:
            torch.empty(2**60)
        return forward(model, batch)

    one.forward = greedy
    recovery = Recovery(one)
    assert recovery.step(window(16)).applied
    assert (recovery.retries, one.micro_batch_size) == (2, 4)


LIMITED = """
import resource, sys
import torch
from torch import nn
from pipeline.engine import CrossEntropy, Precision, Recovery, Trainer
torch.manual_seed(0)
torch.set_num_threads(1)
layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
model = nn.Sequential(*layers)
trainer = Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.1), CrossEntropy(), precision=Precision("fp32"),
    micro_batch_size=4096,
)
recovery = Recovery(trainer)
warm = torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64)
recovery.step(warm)
window = torch.randn(4096, 3, 32, 32), torch.zeros(4096, dtype=torch.int64)
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 200 * 2**20,) * 2)
result = recovery.step(window)
print(result.applied, result.samples, recovery.retries > 0, trainer.micro_batch_size < 4096)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")
def test_a_limit_of_the_address_space_is_survived() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["True", "4096", "True", "True"], done.stderr[-2000:]


PARTS = (slice(0, 7), slice(7, 12))


def train_ranks(rank: int, port: int, folder: Path, above: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DistributedDataParallel(net(dtype=torch.float64))
    one = trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), micro=6)
    recovery = Recovery(one)
    if rank == 1:
        failing(one, "backward", out_of_memory, above)
    results: list[Any] = []
    try:
        for seed in range(2):
            images, labels = window(12, seed, dtype=torch.float64)
            one.micro_batch_size = min(one.micro_batch_size, 4)
            recovery.step((images[PARTS[rank]], labels[PARTS[rank]]))
    except DoesNotFitError as error:
        results.append(str(error))
    torch.save(
        (copies(model.parameters()), recovery.retries, one.micro_batch_size, results), folder / f"{rank}.pt"
    )
    dist.destroy_process_group()


@pytest.mark.parametrize(("above", "size"), [(2, 1), (0, 1)])
def test_ranks_agree(tmp_path: Path, above: int, size: int) -> None:
    """One of two runs out of memory: both take the window again, or both end, and none waits for ever."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = mp.spawn(train_ranks, (port, tmp_path, above), nprocs=2, join=False)
    assert context.join(timeout=60) or context.join(timeout=30)
    (first, retries, micro, told), (second, retries_1, micro_1, told_1) = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)
    )
    assert equal(first, second)
    if above == 0:
        assert told
        assert told_1
        return
    assert retries == retries_1 == 1
    assert micro == micro_1 == size
    whole = trainer(net(dtype=torch.float64), micro=12)
    whole.optimizer = torch.optim.SGD(whole.model.parameters(), lr=0.5)
    for seed in range(2):
        whole.step(window(12, seed, dtype=torch.float64))
    assert distance(first, copies(whole.model.parameters())) < 1e-12
