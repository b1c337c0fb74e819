"""Running statistics as if the window had been one batch; the oracle is the whole window in float64."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import copies, equal, net, trainer, window
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.engine import CrossEntropy, Precision, Trainer


def one_layer(momentum: float | None = 0.1, kind: type[nn.Module] = nn.BatchNorm2d) -> nn.Module:
    torch.manual_seed(0)
    layer = kind(3, momentum=momentum)
    nn.init.normal_(layer.running_mean)
    nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return layer.double()


def drifting(samples: int, *shape: int) -> Tensor:
    """Inputs whose mean moves from sample to sample, so that micro-batches differ."""
    generator = torch.Generator().manual_seed(samples)
    noise = torch.randn(samples, 3, *shape, generator=generator, dtype=torch.float64)
    return noise * 2 + torch.linspace(0, 3, samples, dtype=torch.float64).view(-1, *[1] * (1 + len(shape)))


def trained(layer: nn.Module, inputs: Tensor, micro: int, windows: int = 1, **options: object) -> Trainer:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    stepper = Trainer(
        layer,
        optimizer,
        lambda outputs, inputs: (outputs.square().sum(), len(inputs)),
        precision=Precision("fp32"),
        micro_batch_size=micro,
        forward=lambda model, batch: (model(batch), batch),
        **options,
    )
    for _ in range(windows):
        assert stepper.step(inputs).applied
    return stepper


def assert_same_statistics(layer: nn.Module, oracle: nn.Module) -> None:
    torch.testing.assert_close(layer.running_mean, oracle.running_mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.running_var, oracle.running_var, rtol=1e-12, atol=1e-12)
    assert torch.equal(layer.num_batches_tracked, oracle.num_batches_tracked)


@settings(max_examples=30, deadline=None)
@given(samples=st.integers(2, 40), micro=st.integers(2, 45), momentum=st.sampled_from([0.1, 0.7, 1.0, None]))
def test_any_split_gives_the_whole_windows_statistics(samples: int, micro: int, momentum: float) -> None:
    inputs = drifting(samples, 4, 4)
    layer, oracle = one_layer(momentum), one_layer(momentum)
    trained(layer, inputs, micro, windows=3)
    for _ in range(3):
        oracle(inputs)
    assert_same_statistics(layer, oracle)


def test_one_value_a_channel_and_sample_too() -> None:
    inputs = drifting(10)
    layer, oracle = one_layer(kind=nn.BatchNorm1d), one_layer(kind=nn.BatchNorm1d)
    trained(layer, inputs, 4)
    oracle(inputs)
    assert_same_statistics(layer, oracle)


def test_a_layer_that_is_called_twice_moves_twice_as_in_one_batch() -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = one_layer()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.norm(inputs) + self.norm(inputs[:, :, :2] + 5).mean(2, keepdim=True)

    inputs = drifting(12, 4, 4)
    model, oracle = Siamese(), Siamese()
    trained(model, inputs, 5)
    oracle(inputs)
    assert_same_statistics(model.norm, oracle.norm)


def test_recomputation_moves_nothing() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = one_layer()

        def forward(self, inputs: Tensor) -> Tensor:
            return checkpoint(self.norm, inputs, use_reentrant=False)

    inputs = drifting(12, 4, 4)
    model, oracle = Recomputed(), one_layer()
    trained(model, inputs, 5)
    oracle(inputs)
    assert_same_statistics(model.norm, oracle)


def test_a_forward_in_evaluation_mode_inside_a_step_sees_the_statistics_from_before() -> None:
    inputs, layer = drifting(8, 2, 2), one_layer()
    expected = copy.deepcopy(layer).eval()(inputs)
    seen = []

    def loss(outputs: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        layer.eval()
        with torch.no_grad():
            seen.append(layer(batch))
        layer.train()
        return outputs.sum(), len(batch)

    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    forward = lambda model, batch: (model(batch), batch)  # noqa: E731
    Trainer(layer, optimizer, loss, precision=Precision("fp32"), micro_batch_size=4, forward=forward).step(
        inputs
    )
    assert torch.equal(torch.cat(seen), expected)


def test_a_frozen_layer_in_evaluation_mode_stays() -> None:
    layer = one_layer().eval()
    before = copies(layer.buffers())
    trained(layer, drifting(8, 2, 2), 4)
    assert equal(copies(layer.buffers()), before)


def test_after_an_error_the_layers_are_torchs_again() -> None:
    layer = one_layer()
    stepper = trained(layer, drifting(8, 2, 2), 4)
    before = copies(layer.buffers())
    stepper.loss = lambda *arguments: 1 / 0
    with pytest.raises(ZeroDivisionError):
        stepper.step(drifting(8, 2, 2))
    assert equal(copies(layer.buffers()), before)
    assert "forward" not in vars(layer)
    layer(drifting(4, 2, 2))
    assert not equal(copies(layer.buffers()), before)


def test_turned_off_the_statistics_move_with_each_micro_batch_and_a_skip_still_moves_nothing() -> None:
    inputs = drifting(12, 4, 4)
    layer, oracle = one_layer(), one_layer()
    stepper = trained(layer, inputs, 4, batchnorm_per_window=False)
    for part in inputs.split(4):
        oracle(part)
    assert_same_statistics(layer, oracle)
    before = copies(layer.buffers())
    assert not stepper.step(inputs * math.nan).applied
    assert equal(copies(layer.buffers()), before)


@pytest.mark.parametrize("name", ["amp_bf16", "amp_fp16"])
def test_in_half_precision_the_statistics_are_the_whole_windows_within_its_rounding(name: str) -> None:
    """The inputs of BatchNorm are rounded to half precision (2^-8 in bfloat16); the pooling is not."""
    model, whole = net(batchnorm=True), net(batchnorm=True)
    trainer(model, precision=name, micro=3).step(window(12))
    trainer(whole, precision=name, micro=12).step(window(12))
    for mine, other in zip(model.buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_the_gradients_are_torchs_own() -> None:
    """Diverting the statistics changes nothing in forward and backward."""
    ours, theirs = net(batchnorm=True), net(batchnorm=True)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    trainer(ours, torch.optim.SGD(ours.parameters(), lr=0.1), micro=6).step(window(12))
    for part in (slice(0, 6), slice(6, 12)):
        images, labels = window(12)
        total, _ = CrossEntropy()(theirs(images[part]), labels[part])
        (total / 12).backward()
    optimizer.step()
    assert equal(copies(ours.parameters()), copies(theirs.parameters()))
