from collections.abc import Iterator

import pytest
import torch

from pipeline.stages import device


def test_emulated_float16_is_told_where_the_processor_has_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for has_it in (True, False):
        monkeypatch.setattr(device, "_cpu_has_float16", lambda has_it=has_it: has_it)
        for precision in ("amp_fp16", "amp_bf16", "fp32"):
            device.note_on_precision(precision, torch.device("cpu"))
            said = capsys.readouterr().out
            assert ("10 to 20 times slower" in said) == (precision == "amp_fp16" and not has_it)


@pytest.fixture
def settings() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    yield
    torch.set_deterministic_debug_mode(before[0])
    torch.backends.cudnn.benchmark = before[1]


@pytest.mark.usefixtures("settings")
def test_strict_determinism_unless_the_model_cannot_have_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's attention is deterministic in the strict mode alone (its kernels warn so otherwise)."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    device.set_determinism(True, [])
    assert torch.get_deterministic_debug_mode() == 2
    assert not torch.backends.cudnn.benchmark
    assert capsys.readouterr().out == ""
    device.set_determinism(True, ["AdaptiveAvgPool2d"])
    assert torch.get_deterministic_debug_mode() == 1
    assert "CUDA has no deterministic AdaptiveAvgPool2d" in capsys.readouterr().out
    device.set_determinism(False, [])
    assert torch.get_deterministic_debug_mode() == 0
    assert torch.backends.cudnn.benchmark
