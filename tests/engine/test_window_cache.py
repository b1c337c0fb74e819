"""One autocast region around a window: what is kept in it must change nothing."""

import pytest
import torch
from nets import copies, equal, net, trainer, window
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.engine import CrossEntropy, Precision, Trainer

HALVES = ["amp_bf16", "amp_fp16"]


def stepped(name: str, *, cache: bool = True, model: nn.Module | None = None, **options: object) -> nn.Module:
    model = model or net()
    stepper = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        options.pop("loss", CrossEntropy()),
        precision=Precision(name, cache_casts=cache),
        micro_batch_size=4,
        **options,
    )
    for seed in range(3):
        assert stepper.step(window(12, seed)).applied
    return model


@pytest.mark.parametrize("name", HALVES)
def test_the_cache_changes_no_bit(name: str) -> None:
    assert equal(copies(stepped(name).parameters()), copies(stepped(name, cache=False).parameters()))


@pytest.mark.parametrize("name", HALVES)
def test_a_weight_is_cast_once_a_window(name: str) -> None:
    """The half-precision weight that a layer uses is one tensor over the window's micro-batches."""
    seen = set()

    class Watched(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            outputs = super().forward(inputs.flatten(1))
            saved = outputs.grad_fn.next_functions[-1][0]
            seen.add(id(saved.next_functions[0][0]) if saved.next_functions else None)
            return outputs

    model = Watched(72, 5)
    trainer(model, precision=name, micro=4).step(window(16))
    assert len(seen) == 1


@pytest.mark.parametrize("name", ["fp32", *HALVES])
def test_a_forward_without_gradients_inside_a_step_loses_none(name: str) -> None:
    """A teacher's forward, of the same model and before the one that is trained: it fills the cache."""

    def consistent(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            model(batch[0])
        with torch.inference_mode():
            model(batch[0])
        return model(batch[0]), batch[1]

    plain, taught = stepped(name), stepped(name, forward=consistent)
    assert equal(copies(plain.parameters()), copies(taught.parameters()))


@pytest.mark.parametrize("name", ["fp32", *HALVES])
def test_an_evaluation_after_a_step_sees_the_new_weights(name: str) -> None:
    """Nothing stale is left: the cache ends with the window."""
    model = stepped(name)
    fresh = net()
    fresh.load_state_dict(model.state_dict())
    images, _ = window(4, 9)
    precision = Precision(name)
    with torch.no_grad(), precision.autocast():
        first = model(images)
    with torch.no_grad(), precision.autocast():
        assert torch.equal(first, fresh(images))


@pytest.mark.parametrize("name", ["fp32", *HALVES])
def test_activation_checkpointing_changes_no_bit(name: str) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = net()

        def forward(self, inputs: Tensor) -> Tensor:
            return checkpoint(self.layers, inputs, use_reentrant=False)

    plain, recomputed = stepped(name), stepped(name, model=Recomputed())
    assert equal(copies(plain.parameters()), copies(recomputed.parameters()))
