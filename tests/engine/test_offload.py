"""Activations in host memory: the same bits, moved once, and nothing moved that stays anyhow."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from blocky import PRECISIONS, Answered, blocky, one_thread, saving_trainer, train  # noqa: F401
from nets import equal, net, trainer, window
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.engine import Precision, offloaded
from pipeline.engine.step import supervised
from pipeline.engine.transfer import stands_on_host
from pipeline.memory.ledger import Ledger
from pipeline.memory.trace import count_step

# --- the same result


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("savers", [["offload"], ["recompute", "offload"]], ids="+".join)
def test_offloading_changes_no_bit(precision: str, savers: list[str]) -> None:
    """Over uneven micro-batches, clipping, dropout, BatchNorm and a skipped window."""
    plain = train(saving_trainer(blocky(), (), precision))
    assert equal(train(saving_trainer(blocky(), savers, precision)), plain)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_casts_that_are_not_cached_change_no_bit(precision: str) -> None:
    plain = train(saving_trainer(blocky(), (), precision))
    savers = ["recompute", "offload"]
    assert equal(train(saving_trainer(blocky(), savers, precision, cache_casts=False)), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("savers", [["offload"], ["recompute", "offload"]], ids="+".join)
def test_on_cuda_offloading_changes_no_bit(precision: str, savers: list[str]) -> None:
    results = []
    for chosen in ([], savers):
        model = blocky().cuda()
        results.append(train(saving_trainer(model, chosen, precision, device="cuda", cache_casts=not chosen)))
    assert equal(*results)


# --- what a saved tensor looks like when it comes back


class Kept(torch.autograd.Function):
    """Saves tensors, and leaves them in `returned` as the backward got them. The anchor makes it have one."""

    returned: list[Tensor]

    @staticmethod
    def forward(context, anchor: Tensor, *tensors: Tensor) -> Tensor:
        context.save_for_backward(*tensors)
        return torch.zeros(())

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple:
        Kept.returned = list(context.saved_tensors)
        return (None,) * (1 + len(Kept.returned))


def sent(make: Callable[[Tensor], list[Tensor]], small_bytes: int = 0) -> tuple[list[Tensor], int]:
    """What comes back of the tensors that `make` makes of a (3, 8, 4) one, and how many bytes were moved."""
    model = nn.Linear(1, 1)

    def forward(model: nn.Module, batch: Tensor) -> tuple[Tensor]:
        source = torch.arange(96.0).view(3, 8, 4).requires_grad_() * 1  # an activation
        tensors = make(source)
        expected[:] = [tensor.detach().clone() for tensor in tensors]
        geometry[:] = [(tensor.stride(), tensor.dtype, tensor.is_conj()) for tensor in tensors]
        return (Kept.apply(next(model.parameters()), *tensors),)

    expected: list[Tensor] = []
    geometry: list[tuple] = []
    with Ledger() as ledger:
        (output,) = offloaded(forward, model, small_bytes=small_bytes)(model, torch.zeros(1))
    output.backward()
    assert equal(
        [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in Kept.returned],
        [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in expected],
    )
    assert [(tensor.stride(), tensor.dtype, tensor.is_conj()) for tensor in Kept.returned] == geometry
    return Kept.returned, ledger.moved_to_host


ALL = 96 * 4  # bytes


@pytest.mark.parametrize(
    ("name", "make", "moved"),
    [
        ("itself", lambda x: [x], ALL),
        ("transposed", lambda x: [x.transpose(0, 2)], ALL),
        ("every second row", lambda x: [x[:, ::2]], ALL),
        ("one column of all", lambda x: [x[:, 0]], ALL),
        ("one of three, in one piece", lambda x: [x[1]], ALL // 3),
        ("the end of each row", lambda x: [x[2, 4:, 2:]], 14 * 4),
        ("expanded", lambda x: [x[:, :1].expand(3, 8, 4)], ALL),
        ("expanded from nothing else", lambda x: [x[0, 0].expand(50, 4)], 16),
        ("overlapping", lambda x: [x.as_strided((5, 4), (1, 1), 2)], 8 * 4),
        ("0-dim", lambda x: [x[1, 1, 1]], 4),
        (
            "a copy in another order",
            lambda x: [x.unsqueeze(0).contiguous(memory_format=torch.channels_last)],
            ALL,
        ),
        ("as other numbers", lambda x: [x.detach().view(torch.int16)], ALL),
        ("empty", lambda x: [x[:0]], 0),
        ("complex conjugate", lambda x: [torch.view_as_complex(x.view(3, 8, 2, 2)).conj()], 0),
        ("twice", lambda x: [x, x], ALL),
        ("two views", lambda x: [x.flatten(), x.permute(2, 0, 1)], ALL),
        ("three interleaved", lambda x: list(x.view(4, 3, 8).unbind(1)), ALL),
        ("three in a row", lambda x: list(x.unbind(0)), ALL),
        ("after a part of it", lambda x: [x[0], x], ALL // 3 + ALL),
        ("in two dtypes", lambda x: [x, x.detach().view(torch.int32)], 2 * ALL),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_saved_tensor_comes_back_as_it_was(
    name: str, make: Callable[[Tensor], list[Tensor]], moved: int
) -> None:
    """Values, strides and dtype; a storage is moved once, and no more of it than is needed."""
    assert sent(make)[1] == moved


def test_a_storage_that_changes_between_two_savings_is_moved_twice() -> None:
    def make(source: Tensor) -> list[Tensor]:
        before = source.detach()
        graphs.append(Kept.apply(torch.ones((), requires_grad=True), before))
        before.add_(1)
        return [before]

    graphs: list[Tensor] = []

    _, moved = sent(make)
    assert moved == 2 * ALL
    graphs[0].backward()
    assert Kept.returned[0].flatten().tolist() == list(range(96))


def test_pieces_of_one_storage_come_back_as_one_copy() -> None:
    returned, _ = sent(lambda x: list(x.view(4, 3, 8).unbind(1)))
    assert len({tensor.untyped_storage().data_ptr() for tensor in returned}) == 1


def test_small_storages_stay_and_a_change_in_place_is_noticed() -> None:
    assert sent(lambda x: [x], small_bytes=ALL + 1)[1] == 0
    assert sent(lambda x: [x], small_bytes=ALL)[1] == ALL

    def forward(model: nn.Module, batch: Tensor) -> tuple[Tensor]:
        inner = model(batch)
        outputs = inner.exp().sum() + (inner * inner).sum()
        inner.detach().mul_(2)
        return (outputs,)

    model = nn.Linear(4, 4)
    (outputs,) = offloaded(forward, model)(model, torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.backward()


# --- what stays


@contextmanager
def moving(model: nn.Module, precision: Precision, batch: Tensor, **options: int) -> Iterator[int]:
    """Bytes that a forward moves to the host, its graph still there."""
    forward = offloaded(lambda model, batch: (model(batch),), model, **{"small_bytes": 0} | options)
    with precision.autocast(), Ledger() as ledger:
        outputs = forward(model, batch)
        yield ledger.moved_to_host
    assert outputs[0].requires_grad


@pytest.mark.parametrize("cached", [True, False], ids=["cached casts", "uncached casts"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_parameters_their_casts_and_the_micro_batch_stay(precision: str, cached: bool) -> None:
    """Moved are the ReLU's output, which the next layer saves too, and the cast of the micro-batch."""
    model = nn.Sequential(nn.Linear(72, 64), nn.ReLU(), nn.Linear(64, 5))
    chosen = Precision(precision, cache_casts=cached)
    size = 4 if chosen.dtype is None else 2
    with moving(model, chosen, torch.randn(6, 72)) as moved:
        assert moved == 6 * 64 * size + (0 if chosen.dtype is None else 6 * 72 * size)


def test_a_convolution_and_parts_of_a_weight_stay_too() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, 6))
            self.register_buffer("mask", torch.ones(5, 6))
            self.layer = nn.Conv2d(1, 3, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            query, key, _ = self.weight.to(torch.float64).chunk(3)
            first = inputs.double() * self.mask @ query.t() @ key
            return self.layer(inputs[None, None]).sum() + first.sum()

    with moving(Parts(), Precision("fp32"), torch.randn(5, 6)) as moved:
        assert moved == 5 * 6 * 8 + 5 * 4 * 8  # the two left operands, in float64; of the weight nothing


def test_nothing_of_a_small_model_is_worth_a_copy() -> None:
    model = net()
    assert count_step(trainer(model, forward=offloaded(supervised, model)), window(8)).host == 0


# --- memory


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_activations_are_on_the_host_and_gone_after_the_window(precision: str) -> None:
    plain = count_step(saving_trainer(blocky(), (), precision), window(8))
    model = blocky()
    stepper = saving_trainer(model, ["offload"], precision)
    with Ledger() as ledger:
        stepper.step(window(8))
    assert ledger.host == 0
    counted = count_step(stepper, window(8))
    assert counted.highest["activations"] < 0.6 * plain.highest["activations"]
    assert counted.moved_each == 2 * 2 * counted.host  # two micro-batches, one at a time, there and back


def test_the_inputs_of_recomputed_blocks_are_offloaded() -> None:
    """All that is left of a block on the device is nothing: tensors in tuples and named ones are seen too."""
    recomputed = count_step(saving_trainer(blocky(), ["recompute"]), window(4))
    both = count_step(saving_trainer(blocky(), ["recompute", "offload"]), window(4))
    pair = 2 * 4 * 8 * 36 * 4  # bytes of a block's two inputs
    assert both.host >= 5 * pair // 2  # the first block's total is 0-dim
    assert both.host < 4 * pair
    assert both.highest["activations"] < recomputed.highest["activations"]


def test_what_is_on_the_host_is_known_to_be_there() -> None:
    seen: list[Tensor] = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), options=None):
            if operation is torch.ops.aten.copy_.default and stands_on_host(arguments[0]):
                seen.append(arguments[0])
            return operation(*arguments, **(options or {}))

    with Watching():
        saving_trainer(blocky(), ["offload"]).step(window(4))
    assert len(seen) > 10
    alive = [weakref.ref(tensor) for tensor in seen]
    seen.clear()
    assert not any(one() is not None for one in alive)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("savers", [["offload"], ["recompute", "offload"]], ids="+".join)
def test_a_step_on_fake_tensors_offloads_as_a_real_one(precision: str, savers: list[str]) -> None:
    images, labels = window(10)
    real = count_step(saving_trainer(blocky(), savers, precision), (images, labels))
    with FakeTensorMode(allow_non_fake_inputs=True):
        stepper = saving_trainer(blocky(), savers, precision, kind=Answered)
        fake = count_step(stepper, (torch.randn(10, 2, 6, 6), torch.zeros(10, dtype=torch.int64)))
    assert fake.host == pytest.approx(real.host, rel=0.01)  # fake batch_norm has other bookkeeping in amp
    assert fake.moved_each == pytest.approx(real.moved_each, rel=0.01)
    assert fake.moved_each > 0
