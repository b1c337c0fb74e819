"""What stands around a step in real scripts must neither enter it nor be broken by it."""

import math

import pytest
import torch
from nets import copies, equal, net, trainer, window
from torch import Tensor, nn

from pipeline.engine import CrossEntropy, MeanSquaredError, Precision, Trainer, allocate_state, fit


def test_a_loss_of_many_items_keeps_the_meaning_of_the_loss_scale() -> None:
    """Per-pixel cross entropy of 512 x 512 pixels: float16 gradients as large as those of torch's mean."""
    torch.manual_seed(0)
    model = nn.Conv2d(1, 2, 3, padding=1)
    stepper = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        CrossEntropy(),
        precision=Precision("amp_fp16"),
        micro_batch_size=2,
    )
    images = torch.randn(4, 1, 512, 512)
    labels = (images[:, 0] > 0).long()
    results = [stepper.step((images, labels)) for _ in range(3)]
    assert [result.applied for result in results] == [True] * 3
    assert stepper.precision.state_dict()["scale"] == 65536.0
    assert results[2].loss < results[0].loss


@pytest.mark.parametrize("micro", [1, 3])
def test_items_that_are_known_late_change_no_bit_of_float32_training(micro: int) -> None:
    """The stand-in for the items of a sample is a power of two."""
    weights = []
    for as_tensor in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 6)

        def loss(
            outputs: Tensor, targets: Tensor, as_tensor: bool = as_tensor
        ) -> tuple[Tensor, int | Tensor]:
            total, count = MeanSquaredError()(outputs, targets)
            return total, torch.tensor(count) if as_tensor else count

        stepper = Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss,
            precision=Precision("fp32"),
            micro_batch_size=micro,
        )
        for seed in range(3):
            inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
            stepper.step((inputs, inputs * 2))
        weights.append(copies(model.parameters()))
    assert equal(*weights)


def test_a_batchnorm_that_is_first_called_late_in_a_window_stays_finite() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.late, self.calls = nn.BatchNorm1d(3), nn.BatchNorm1d(3), 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            outputs = self.always(inputs)
            return self.late(outputs) if self.calls >= 3 else outputs

    model = Sometimes()
    stepper = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        MeanSquaredError(),
        precision=Precision("fp32"),
        micro_batch_size=4,
    )
    inputs = torch.randn(16, 3)
    assert stepper.step((inputs, inputs)).applied
    assert all(torch.isfinite(buffer).all() for buffer in model.buffers())
    assert int(model.late.num_batches_tracked) == 1
    assert not torch.equal(model.late.running_var, torch.ones(3))


def test_an_outer_autocast_region_keeps_no_casts_of_old_weights() -> None:
    inside, outside = net(), net()
    for model, outer in ((inside, True), (outside, False)):
        stepper = trainer(model, precision="amp_bf16")
        with torch.autocast("cpu", torch.bfloat16, enabled=outer):
            for seed in range(4):
                stepper.step(window(8, seed))
    assert equal(copies(inside.parameters()), copies(outside.parameters()))


def test_gradients_that_something_else_left_do_not_enter_the_window() -> None:
    clean, soiled = net(), net()
    for model in (clean, soiled):
        stepper = trainer(model)
        if model is soiled:
            model(window(3, 9)[0]).sum().backward()
        stepper.step(window(8))
    assert equal(copies(clean.parameters()), copies(soiled.parameters()))


@pytest.mark.parametrize("fault", ["another model's optimizer", "no_grad"])
def test_a_training_that_cannot_learn_ends_with_the_reason(fault: str) -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1) if fault != "no_grad" else None
    stepper = trainer(net(), optimizer, max_consecutive_skips=3)
    with pytest.raises(RuntimeError, match="depended on none of the optimizer's parameters"):
        for _ in range(5):
            with torch.set_grad_enabled(fault != "no_grad"):
                stepper.step(window(8))
    assert stepper.state.step == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0 must be at least 0"),
        ({"max_grad_norm": math.nan}, "max_grad_norm=nan"),
        ({"micro": 0}, "micro_batch_size=0"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips=0"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_construction(options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trainer(net(), **options)


def test_without_a_schedule_the_learning_rate_is_the_users() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    stepper = trainer(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    rates = []
    for seed in range(3):
        rates.append(stepper.step(window(8, seed)).learning_rate)
        scheduler.step()
    assert rates == pytest.approx([1.0, 0.1, 0.01])


def test_after_an_error_anywhere_in_a_window_the_next_one_is_as_if_nothing_had_been() -> None:
    """In the optimizer's step under a scaler, and in a forward that has moved a buffer."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(72, 5)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, inputs: Tensor) -> Tensor:
            self.seen += 1
            if self.seen == 2 and self.failing:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return self.layer(inputs.flatten(1))

        failing = True

    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = trainer(model, optimizer, precision="amp_fp16")
    with pytest.raises(torch.OutOfMemoryError):
        stepper.step(window(8))
    assert float(model.seen) == 0.0
    model.failing = False
    handle = optimizer.register_step_pre_hook(
        lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("step"))
    )
    with pytest.raises(torch.OutOfMemoryError):
        stepper.step(window(8))
    handle.remove()
    assert stepper.step(window(8)).applied


def test_a_buffer_that_comes_and_goes_is_put_back() -> None:
    model = net()
    model.register_buffer("cache", None)
    stepper = trainer(model)
    images, labels = window(8)
    assert not stepper.step((images * math.nan, labels)).applied
    model.cache = torch.ones(3)
    assert not stepper.step((images * math.nan, labels)).applied
    assert torch.equal(model.cache, torch.ones(3))


def test_a_frozen_batchnorm_stays_frozen_in_fit_and_a_model_left_in_evaluation_mode_does_not() -> None:
    model = net(batchnorm=True).train()
    model[1].eval()
    before = copies(model.buffers())
    stepper = trainer(model)
    modes = []

    def after_step(result: object) -> None:
        modes.append((model.training, model[1].training))
        model.eval()

    fit(
        stepper,
        lambda epoch, seen: [window(8, seed) for seed in range(3)],
        epochs=1,
        after_step=after_step,
        after_epoch=lambda epoch: None,
    )
    assert modes == [(True, False)] * 3
    assert equal(copies(model.buffers()), before)


def test_a_batchnorm_with_a_forward_of_its_own_is_left_to_itself() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(72), nn.Linear(72, 5))
    calls = 0
    original = model[1].forward

    def wrapped(inputs: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return original(inputs)

    model[1].forward = wrapped
    trainer(model).step(window(8))
    assert calls == 2
    assert model[1].forward is wrapped


def test_a_lazy_batchnorm_is_refused_until_it_knows_its_size() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="run one forward of the model first"):
        trainer(model, torch.optim.SGD(model[0].parameters(), lr=0.1))


def test_losses_of_ones_own_are_not_mistaken_for_torchs() -> None:
    class Focal(nn.CrossEntropyLoss):
        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return super().forward(outputs, targets) ** 2

    class Summing(nn.Module):
        reduction = "sum"

        def forward(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
            return nn.functional.cross_entropy(outputs, targets, reduction="sum"), len(targets)

    with pytest.raises(ValueError, match="returns"):
        trainer(net(), loss=Focal()).step(window(8))
    assert trainer(net(), loss=Summing()).step(window(8)).loss == trainer(net()).step(window(8)).loss


def test_targets_that_would_be_broadcast_are_refused() -> None:
    model = nn.Linear(2, 1)
    stepper = trainer(model, loss=nn.MSELoss())
    with pytest.raises(ValueError, match=r"outputs \(4, 1\) and targets \(4,\) must have one shape"):
        stepper.step((torch.ones(8, 2), torch.ones(8)))


def test_a_window_that_the_default_forward_cannot_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected to be \(inputs, targets\), not dict"):
        trainer(net()).step({"images": window(4)[0], "labels": window(4)[1]})


def test_optimizers_that_cannot_be_stepped_so_are_refused() -> None:
    model = net()
    with pytest.raises(ValueError, match="LBFGS"):
        trainer(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="NAdam"):
        allocate_state(torch.optim.NAdam(model.parameters()))
    with pytest.raises(ValueError, match="SGD"):
        allocate_state(torch.optim.SGD(model.parameters(), momentum=0.9, dampening=0.9))


def test_counts_in_half_precision_do_not_saturate() -> None:
    """bfloat16 cannot count past 256."""

    def counted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, count = CrossEntropy()(outputs, targets)
        return total, torch.tensor([count], dtype=torch.bfloat16)

    batch = window(512)
    ours, theirs = (trainer(net(), micro=1, loss=loss).step(batch).loss for loss in (counted, CrossEntropy()))
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_masked_logits_are_not_blamed_for_a_loss_that_broke_elsewhere() -> None:
    class Masked(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.masked_fill(torch.arange(5) == 4, -math.inf)

    class Broken(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs * math.nan

    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 5), Masked(), Broken())
    with pytest.raises(RuntimeError) as raised:
        trainer(model, max_consecutive_skips=1).step(window(4))
    assert raised.value.diagnosis.first.module == "3 (Broken)"
