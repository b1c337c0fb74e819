import pytest
import torch
from nets import net, trainer, window
from torch import nn

from pipeline.engine import allocate_state, build_optimizer
from pipeline.memory import usage
from pipeline.memory.ledger import COMPONENTS, Peak
from pipeline.memory.prediction import Prediction, Work
from pipeline.memory.usage import Measured, Meter, prediction_error


def test_the_components_are_exact() -> None:
    """AdamW holds two float32 moments a trained parameter, and a step count of 4 bytes each."""
    model = nn.Sequential(nn.Linear(100, 50), nn.BatchNorm1d(50), nn.Linear(50, 10, bias=False))
    model[2].requires_grad_(False)
    optimizer = build_optimizer(model, "adamw", lr=0.1)
    allocate_state(optimizer)
    trained = 100 * 50 + 50 + 50 + 50
    buffers = 2 * 50 * 4 + 8
    assert usage.components(model, optimizer) == {
        "parameters_mib": (4 * (trained + 500) + buffers) / 2**20,
        "gradients_mib": 4 * trained / 2**20,
        "optimizer_state_mib": (8 * trained + 4 * 4) / 2**20,
    }


def test_the_peak_resident_set_sees_what_was_taken() -> None:
    before = usage.peaks(torch.device("cpu"))["host_peak_rss_mib"]
    taken = torch.ones(int(before + 200) * 2**20 // 4)
    after = usage.peaks(torch.device("cpu"))["host_peak_rss_mib"]
    assert taken.sum() > 0
    assert after >= before + 150


def test_the_meter_counts_the_first_applied_window_and_each_new_micro_batch() -> None:
    step_taker = trainer(net(), micro=4)
    meter = Meter(step_taker, step_taker.step)
    infinite = (torch.full((8, 2, 6, 6), torch.inf), window(8)[1])
    assert meter.measured is None
    assert meter.logged() == {}
    meter.step(infinite)
    skipped = meter.measured
    meter.step(window(8))
    first = meter.measured
    assert skipped is not first, "a skipped window has no update: the next one is counted too"
    meter.step(window(8))
    assert meter.measured is first, "nothing new to tell"
    step_taker.micro_batch_size = 2
    meter.step(window(8))
    assert first is not None
    assert meter.measured is not None
    assert (first.micro_batch_size, meter.measured.micro_batch_size) == (4, 2)
    assert meter.measured.highest["activations"] < first.highest["activations"]


def test_the_meter_sees_what_a_ledger_sees_and_changes_no_weight() -> None:
    metered, plain = (trainer(net(), micro=4) for _ in range(2))
    meter = Meter(metered, metered.step)
    for _ in range(2):
        assert meter.step(window(8)).loss == plain.step(window(8)).loss
    assert all(map(torch.equal, metered.model.parameters(), plain.model.parameters()))
    assert meter.measured is not None
    logged = meter.logged()
    assert logged["activations_mib"] == meter.measured.highest["activations"] / 2**20 > 0
    assert logged["peak_allocated_mib"] == meter.measured.peak.total / 2**20


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_a_later_window_counts_as_a_first_one_does(precision: str) -> None:
    """A training that is resumed counts its first window, and should log what it had logged uninterrupted."""
    long, fresh, new = (trainer(net(batchnorm=True), precision=precision) for _ in range(3))
    for _ in range(2):
        long.step(window(8))
    fresh.step(window(8))
    counted = []
    for one in (long, fresh, new):
        allocate_state(one.optimizer)
        meter = Meter(one, one.step)
        meter.step(window(8))
        counted.append(meter.measured)
    assert counted[0] == counted[1] == counted[2]


def predicted(allocated: int, reserved: int, micro: int = 4) -> Prediction:
    zeros = dict.fromkeys(COMPONENTS, 0)
    phases = {"forward": 0, "backward": 0, "step": 0}
    return Prediction(
        (), micro, zeros, zeros, allocated, reserved, 0, 0, 0, 0, phases, "", "", "", Work(0, 0, 0, 0)
    )


def test_the_prediction_error_is_of_tensors_and_on_cuda_of_what_was_reserved() -> None:
    measured = Measured(4, Peak(total=100 * 2**20), {}, 0)
    prediction = predicted(110 * 2**20, 130 * 2**20)
    assert prediction_error(prediction, measured, {"host_peak_rss_mib": 900.0}) == {
        "prediction_error": pytest.approx(0.1)
    }
    on_cuda = {"peak_allocated_mib": 100.0, "peak_reserved_mib": 104.0, "device_used_mib": 600.0}
    assert prediction_error(prediction, measured, on_cuda) == {
        "prediction_error": pytest.approx(0.1),
        "prediction_error_reserved": pytest.approx(0.25),
    }


def test_predictions_for_another_micro_batch_are_not_compared() -> None:
    assert prediction_error(predicted(1, 1, micro=8), Measured(4, Peak(total=1), {}, 0), {}) == {}
    assert prediction_error(predicted(1, 1), None, {}) == {}


def test_on_cuda_allocated_reserved_and_device_used_are_three_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A log that says 11 GB where the card shows 26 names only the first."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 11 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 20 * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (54 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    found = usage.peaks(torch.device("cuda"))
    assert found["peak_allocated_mib"] == 11 * 1024
    assert found["peak_reserved_mib"] == 20 * 1024
    assert found["device_used_mib"] == 26 * 1024
