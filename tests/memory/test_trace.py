"""The ledger and the trace: torch's MemTracker is the oracle, real tensors the truth."""

import gc
import itertools
from collections.abc import Callable

import pytest
import torch
import torchvision
from nets import net, window
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity

from pipeline import models
from pipeline.engine import (
    CrossEntropy,
    Precision,
    Trainer,
    WeightAverage,
    allocate_state,
    build_optimizer,
    state_tensors,
)
from pipeline.engine.window import Batch
from pipeline.memory.ledger import COMPONENTS
from pipeline.memory.trace import Trace, TraceError, count_step, trace_step, without_memory

zoo = torchvision.models
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: zoo.resnet18(num_classes=10),
    "mobilenet_v3_small": lambda: zoo.mobilenet_v3_small(num_classes=10),
    "efficientnet_b0": lambda: zoo.efficientnet_b0(num_classes=10),
    "shufflenet_v2_x0_5": lambda: zoo.shufflenet_v2_x0_5(num_classes=10),
    "squeezenet1_1": lambda: zoo.squeezenet1_1(num_classes=10),
    "regnet_y_400mf": lambda: zoo.regnet_y_400mf(num_classes=10),
    "mnasnet0_5": lambda: zoo.mnasnet0_5(num_classes=10),
    "googlenet": lambda: zoo.googlenet(num_classes=10, aux_logits=False, init_weights=False),
    "convnext_tiny": lambda: zoo.convnext_tiny(num_classes=10),
    "swin_t": lambda: zoo.swin_t(num_classes=10),
    "vision transformer": lambda: zoo.VisionTransformer(64, 16, 3, 4, 64, 128, num_classes=10),
    "small_cnn": lambda: models.small_cnn(10, 3),
}
PIXELS = 64
PLAIN: dict[str, Callable[[], nn.Module]] = {  # layers whose kernels need little room besides their results
    "perceptron": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(3 * PIXELS**2, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10)
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (PIXELS // 4) ** 2, 10),
    ),
    "patches": lambda: nn.Sequential(
        nn.Conv2d(3, 64, 8, 8),
        nn.Flatten(2),
        nn.LayerNorm(64),
        nn.Linear(64, 256),
        nn.GELU(),
        nn.Linear(256, 64),
        nn.Flatten(),
        nn.Linear(64 * (PIXELS // 8) ** 2, 10),
    ),
}


def stepper(model: nn.Module, precision: str, *, micro: int = 2, average: float = 0.0, **options) -> Trainer:
    optimizer = build_optimizer(model.train(), options.pop("optimizer", "adamw"), lr=1e-3)
    allocate_state(optimizer)
    return Trainer(
        model,
        optimizer,
        CrossEntropy(),
        precision=Precision(precision, cache_casts=options.pop("cache_casts", True)),
        micro_batch_size=micro,
        max_grad_norm=1.0,
        average=WeightAverage(model, average),
    )


def images(samples: int) -> Batch:
    return torch.zeros(samples, 3, PIXELS, PIXELS), torch.zeros(samples, dtype=torch.int64)


def fake(build: Callable[[], nn.Module], precision: str, samples: int = 4, **options) -> Trace:
    return trace_step(
        lambda: (stepper(without_memory(build), precision, **options), images(samples)), cuda=False
    )


def oracle(trainer: Trainer, batch: Batch) -> int:
    """MemTracker's peak, in bytes; it wants to be told of each forward."""
    tracker = MemTracker()
    tracker.track_external(trainer.model, trainer.optimizer, *batch, *trainer.average.averages)
    forward = trainer.forward

    def told(model: nn.Module, micro_batch: Batch):
        tracker.reset_mod_stats()
        return forward(model, micro_batch)

    trainer.forward = told
    with tracker:
        trainer.step(batch)
    return sum(parts["Total"] for parts in tracker.get_tracker_snapshot("peak").values())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_fake_trace_is_the_real_ledger(name: str) -> None:
    """Twelve families in float32; half precision and MemTracker below, for those that are quick."""
    real = count_step(stepper(FAMILIES[name](), "fp32"), images(4))
    assert fake(FAMILIES[name], "fp32").peak.total == pytest.approx(real.peak.total, rel=0.002)


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "vision transformer", "small_cnn"])
def test_the_fake_trace_is_the_real_ledger_is_memtrackers(name: str, precision: str) -> None:
    real = count_step(stepper(FAMILIES[name](), precision), images(4))
    assert fake(FAMILIES[name], precision).peak.total == pytest.approx(real.peak.total, rel=0.002)
    assert oracle(stepper(FAMILIES[name](), precision), images(4)) == pytest.approx(
        real.peak.total, rel=0.001
    )


def profiled(trainer: Trainer, batch: Batch) -> int:
    """The peak in bytes by torch.profiler, which sees what the allocator gives, inside kernels too."""
    trainer.step(batch)
    always = [*trainer.model.parameters(), *state_tensors(trainer.optimizer), *batch]
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        trainer.step(batch)
    results = profile.profiler.kineto_results.events()
    events = sorted(
        (event for event in results if event.name() == "[memory]"), key=lambda one: one.start_ns()
    )
    running = itertools.accumulate(event.nbytes() for event in events)
    return sum(tensor.nbytes for tensor in always) + max(running)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # the flags' own
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize("name", PLAIN)
def test_the_fake_trace_is_what_the_allocator_gave(name: str, precision: str) -> None:
    """Kernels' own scratch space is in no trace; attention's on a CPU can be much, and so can oneDNN's in
    bfloat16, by what the processor has for it: torch's own kernels have none.
    """
    trace = fake(PLAIN[name], precision)
    with torch.backends.mkldnn.flags(enabled=precision == "fp32"):
        peak = profiled(stepper(PLAIN[name](), precision), images(4))
    assert peak == pytest.approx(trace.peak.total, rel=0.04)


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "amp_fp16"])
def test_components_add_up_and_those_that_are_known_are_exact(precision: str) -> None:
    model = net(batchnorm=True)
    trainer = stepper(model, precision, average=0.9)
    batch = window(4)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    peak = count_step(trainer, batch).peak
    assert tuple(peak.components) == COMPONENTS
    assert sum(peak.components.values()) == peak.total
    assert peak.components["parameters"] == peak.components["average"] == parameters
    assert peak.components["buffers"] == sum(buffer.nbytes for buffer in model.buffers())
    assert peak.components["optimizer_state"] == sum(t.nbytes for t in state_tensors(trainer.optimizer))
    assert peak.components["inputs"] == sum(tensor.nbytes for tensor in batch)
    assert (peak.components["cast_weights"] > 0) == (precision != "fp32")


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw", 2), ("sgd", 1)])
def test_the_optimizers_state_is_its_copies_of_the_parameters(optimizer: str, copies: int) -> None:
    trace = fake(lambda: models.small_cnn(10, 3), "fp32", optimizer=optimizer)
    parameters = trace.peak.components["parameters"]
    state = trace.peak.components["optimizer_state"]
    counters = 4 * 14 if optimizer == "adamw" else 0  # AdamW's step counts: a float32 for each of 14 tensors
    assert state == copies * parameters + counters


def test_the_account_of_docs_memory_md() -> None:
    """4N + 4N + 8N bytes under autocast, and 2N of casts; 1.5 billion parameters come to 24 GB and 3 GB."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), *(nn.Linear(3 * PIXELS**2, 3 * PIXELS**2, bias=False) for _ in range(9))
        )

    trace = fake(build, "amp_fp16", 2, micro=1)
    parts = trace.peak.components
    count = 9 * (3 * PIXELS**2) ** 2
    assert count == pytest.approx(1.36e9, rel=0.01)
    assert parts["parameters"] == parts["gradients"] == 4 * count
    assert parts["optimizer_state"] == 8 * count + 4 * 9  # and a count of steps for each tensor
    assert parts["cast_weights"] == 2 * count
    billions = 1.5e9 / count
    held = [
        parts[name] * billions / 1e9
        for name in ("parameters", "gradients", "optimizer_state", "cast_weights")
    ]
    assert held == pytest.approx([6, 6, 12, 3], rel=1e-6)


def test_accumulation_keeps_the_gradients_through_the_next_forward() -> None:
    one, two = (fake(FAMILIES["resnet18"], "fp32", samples) for samples in (2, 4))
    assert two.peaks["forward"] - one.peaks["forward"] >= one.peak.components["parameters"]


def test_the_cast_cache_costs_the_casts_of_one_window() -> None:
    with_cache = fake(FAMILIES["vision transformer"], "amp_bf16")
    without = fake(FAMILIES["vision transformer"], "amp_bf16", cache_casts=False)
    half = with_cache.peak.components["parameters"] / 2
    assert 0.5 * half < with_cache.peak.components["cast_weights"] <= half
    assert with_cache.peak.total > without.peak.total


def test_the_forward_grows_with_the_micro_batch_and_the_step_does_not() -> None:
    small, large = (fake(FAMILIES["resnet18"], "fp32", 2 * micro, micro=micro) for micro in (2, 16))
    assert large.peaks["backward"] > 1.1 * small.peaks["backward"]
    assert large.peaks["step"] - small.peaks["step"] == 14 * 2 * (
        3 * PIXELS**2 * 4 + 8
    )  # the window's inputs


def test_the_peak_names_its_operation_and_module() -> None:
    peak = fake(FAMILIES["resnet18"], "fp32").peak
    assert (peak.phase, peak.operation) == ("backward", "aten.convolution_backward.default")
    assert peak.module.startswith("layer4.1.conv")


def test_a_trace_takes_no_memory_and_leaves_nothing() -> None:
    """A model of 1.2 GB in float32, with AdamW 4.8 GB."""
    import psutil

    before = psutil.Process().memory_info().rss
    trace = fake(lambda: zoo.vit_l_16(image_size=PIXELS), "fp32")
    gc.collect()
    assert trace.peak.total > 4.8e9
    assert psutil.Process().memory_info().rss - before < 400e6


def test_counting_moves_no_weight_that_the_step_would_not_have_moved() -> None:
    counted, plain = net(), net()
    count_step(stepper(counted, "fp32"), window(4))
    stepper(plain, "fp32").step(window(4))
    assert all(map(torch.equal, counted.parameters(), plain.parameters()))
    assert not any(module._forward_hooks for module in counted.modules())


def test_a_model_that_cannot_be_traced_is_named_with_operation_and_module() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.inner(inputs.flatten(1)[:, :2]) * inputs.sum().item()

    with pytest.raises(TraceError, match=r"aten._local_scalar_dense.default in head, forward"):
        fake(lambda: nn.Sequential(*[nn.Identity()], head := Reading()) and _named(head), "fp32")


def _named(head: nn.Module) -> nn.Module:
    model = nn.Sequential()
    model.add_module("head", head)
    return model


def test_real_and_fake_tensors_can_be_counted_in_one_process() -> None:
    first = count_step(stepper(net(), "fp32"), window(4))
    with FakeTensorMode(allow_non_fake_inputs=True):
        pass
    assert count_step(stepper(net(), "fp32"), window(4)).peak == first.peak
