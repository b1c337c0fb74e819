"""Law 11: no hidden synchronisation. Fake tensors have no values, so a step that reads one cannot run."""

import math

import pytest
import torch
from nets import net, trainer, window
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.engine import (
    CrossEntropy,
    Precision,
    Schedule,
    Trainer,
    WeightAverage,
    allocate_state,
    build_optimizer,
)


class Answered(Trainer):
    """A step whose one read is answered; the fake tensor mode refuses any other."""

    reads = 0

    def read_device(self, packed: Tensor) -> list[float]:
        self.reads += 1
        return [1.0] * packed.numel()


@pytest.mark.parametrize("name", ["fp32", "amp_bf16", "amp_fp16"])
@pytest.mark.parametrize("weighted", [False, True], ids=["samples", "class weights"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_law_11_a_step_reads_the_device_once(name: str, weighted: bool, optimizer: str) -> None:
    """With all parts at work: scaler, clipping, average, schedule, BatchNorm, weights that are data."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = net(batchnorm=True)
        chosen = build_optimizer(model, optimizer, lr=1e-3, weight_decay=0.1)
        allocate_state(chosen)
        stepper = Answered(
            model,
            chosen,
            CrossEntropy(0.1, [1.0, 2.0, 3.0, 4.0, 5.0] if weighted else None),
            precision=Precision(name),
            micro_batch_size=4,
            max_grad_norm=0.5,
            schedule=Schedule("cosine", 10, 0.2),
            average=WeightAverage(model, 0.9),
        )
        images, labels = torch.randn(10, 2, 6, 6), torch.zeros(10, dtype=torch.int64)
        for expected in (1, 2):
            assert stepper.step((images, labels)).applied
            assert stepper.reads == expected


def test_law_11_a_second_read_would_be_noticed() -> None:
    """The method of the test above: an `.item()` in a loss does not pass."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = net()

        def reading(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
            return outputs.sum() / outputs.sum().item(), len(targets)

        stepper = Answered(
            model,
            build_optimizer(model, "adamw", lr=1e-3),
            reading,
            precision=Precision("fp32"),
            micro_batch_size=4,
        )
        with pytest.raises(Exception, match="_local_scalar_dense"):
            stepper.step((torch.randn(4, 2, 6, 6), torch.zeros(4, dtype=torch.int64)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp32", "amp_bf16", "amp_fp16"])
def test_law_11_on_cuda_nothing_but_the_marked_read_synchronises(name: str) -> None:
    class Allowed(Trainer):
        def read_device(self, packed: Tensor) -> list[float]:
            torch.cuda.set_sync_debug_mode("default")
            try:
                return super().read_device(packed)
            finally:
                torch.cuda.set_sync_debug_mode("error")

    model = net(batchnorm=True).cuda()
    optimizer = build_optimizer(model, "adamw", lr=1e-3)
    allocate_state(optimizer)
    stepper = Allowed(
        model,
        optimizer,
        CrossEntropy(0.1, [1.0, 2.0, 3.0, 4.0, 5.0]),
        precision=Precision(name, "cuda"),
        micro_batch_size=4,
        max_grad_norm=0.5,
        average=WeightAverage(model, 0.9),
    )
    images, labels = window(10)
    pinned = images.pin_memory(), labels.pin_memory()
    stepper.step(pinned)  # kernels are loaded, class weights moved
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert stepper.step(pinned).applied
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_on_cuda_a_window_on_the_host_gives_the_bits_of_one_on_the_device() -> None:
    """The copies ahead on a stream of their own: nothing is read before it has arrived."""
    results = []
    for place in ("cpu", "cuda"):
        model = net().cuda()
        stepper = Trainer(
            model,
            build_optimizer(model, "adamw", lr=1e-3),
            CrossEntropy(),
            precision=Precision("fp32", "cuda"),
            micro_batch_size=3,
        )
        for seed in range(4):
            images, labels = window(64, seed)
            assert stepper.step((images.to(place), labels.to(place))).applied
        results.append([parameter.detach().cpu() for parameter in model.parameters()])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


def test_the_read_is_the_norm_the_loss_and_the_scaler() -> None:
    """What the marked read brings decides: a non-finite norm in it is a skip."""

    class Poisoned(Trainer):
        def read_device(self, packed: Tensor) -> list[float]:
            loss, _, *rest = super().read_device(packed)
            return [loss, math.inf, *rest]

    model = net()
    stepper = Poisoned(
        model,
        build_optimizer(model, "adamw", lr=1e-3),
        CrossEntropy(),
        precision=Precision("amp_fp16"),
        micro_batch_size=4,
    )
    result = stepper.step(window(8))
    assert (result.applied, result.found_inf, result.grad_norm) == (False, True, math.inf)
    assert stepper.precision.state_dict()["scale"] == 32768.0
    assert trainer(net()).step(window(8)).applied
