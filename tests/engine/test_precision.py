import pytest
import torch
from torch import nn

from pipeline.engine import Precision, ScalerSettings


def test_the_settings_reach_the_scaler() -> None:
    settings = ScalerSettings(init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    state = Precision("amp_fp16", "cpu", settings).state_dict()
    assert state == {
        "scale": 8.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 0,
    }


@pytest.mark.parametrize(("name", "dtype"), [("amp_fp16", torch.float16), ("amp_bf16", torch.bfloat16)])
def test_autocast_computes_in_half_precision_and_keeps_the_weights(name: str, dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 4)
    with Precision(name).autocast():
        assert layer(torch.ones(2, 4)).dtype == dtype
    assert layer.weight.dtype == torch.float32


def test_only_float16_has_a_scale() -> None:
    assert [Precision(name).scales for name in ("fp32", "amp_bf16", "amp_fp16")] == [False, False, True]
    assert Precision("fp32").state_dict() == {}


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="fp32, amp_fp16, amp_bf16"):
        Precision("fp16")


def test_cuda_without_a_device_is_refused_and_not_silently_disabled() -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    with pytest.raises(ValueError, match="no CUDA device"):
        Precision("amp_fp16", "cuda")


def test_the_private_contracts_of_torch_hold() -> None:
    """What precision.py takes from inside GradScaler; a new torch that changes it fails here first."""
    precision = Precision("amp_fp16", "cpu", ScalerSettings(init_scale=4.0, growth_interval=2))
    scaler = precision.scaler
    assert scaler._scale.shape == scaler._growth_tracker.shape == ()
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler.scale(layer(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    assert [float(value) for value in found.values()] == [0.0]
    precision.update(optimizer, applied=False)
    assert scaler.get_scale() == 2.0
    assert (
        id(optimizer) not in scaler._per_optimizer_states
        or not scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    )


@pytest.mark.parametrize("name", ["fp32", "amp_bf16"])
def test_a_scaler_where_none_is_used_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="uses no loss scale"):
        Precision(name, "cpu", ScalerSettings())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_optimizer_divides_by_grad_scale_and_is_left_without_it(kind: type) -> None:
    """The contract of torch that the folded clip needs, in float32 arithmetic."""
    folded, multiplied = nn.Linear(3, 2), nn.Linear(3, 2)
    multiplied.load_state_dict(folded.state_dict())
    for layer, fused in ((folded, True), (multiplied, False)):
        optimizer = kind(layer.parameters(), lr=0.1, fused=fused)
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        gradients = [parameter.grad for parameter in layer.parameters()]
        Precision("fp32").apply(optimizer, gradients, 0.25)
        assert not hasattr(optimizer, "grad_scale")
        assert all(torch.equal(gradient, torch.full_like(gradient, 0.25)) for gradient in gradients)
    for ours, theirs in zip(folded.parameters(), multiplied.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-22, atol=2**-22)
