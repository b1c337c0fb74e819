"""The room that checkpoints take: said before training, of the size that they then have."""

import math
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipeline import config, models
from pipeline.engine import Checkpoints, Precision, Trainer, WeightAverage, freeze, snapshot
from pipeline.engine.losses import CrossEntropy
from pipeline.stages.best import Best
from pipeline.stages.disk import OVERHEAD_BYTES, note_on_disk, space
from pipeline.stages.quantised import BYTES
from pipeline.stages.setup import build_state

MIB = 2**20


def params_with(**changes: Any) -> config.Params:
    """changes: dotted keys, with __ for the dot."""
    values = yaml.safe_load(Path("params.yaml").read_text())
    for name, value in changes.items():
        section, _, key = name.partition("__")
        values[section][key] = value
    return config.parse(yaml.safe_dump(values))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train__ema_decay": 0.9},
        {"optimizer__name": "sgd"},
        {"optimizer__name": "sgd", "optimizer__momentum": 0.0},
        {"model__freeze": ["layer3.*", "layer4.*"]},
    ],
)
def test_a_checkpoint_takes_what_was_said(changes: dict[str, Any], tmp_path: Path) -> None:
    params = params_with(**{"model__name": "resnet18"} | changes)
    torch.manual_seed(0)
    model = models.build("resnet18", {}, 10, 3)
    freeze(model, params.model.freeze)
    trainer = Trainer(
        model,
        build_state(params, model),
        CrossEntropy(),
        precision=Precision("fp32", torch.device("cpu")),
        micro_batch_size=2,
        average=WeightAverage(model, params.train.ema_decay),
    )
    trainer.step((torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])))
    best = Best("best")
    best.consider(model, 0.5, 1, trainer.average)
    checkpoints = Checkpoints(tmp_path / "kept")
    checkpoints.save({"trainer": snapshot(trainer), "best": best.state_dict()}, 1)

    said = space(params, model)
    assert checkpoints.size_in_bytes() == pytest.approx(said.checkpoint, abs=2 * OVERHEAD_BYTES, rel=0.002)
    assert said.checkpoints == 3 * said.checkpoint  # keep: 2
    assert said.model == sum(t.numel() * t.element_size() for t in model.state_dict().values())


def test_quantised_state_takes_less() -> None:
    model = models.build("resnet18", {}, 10, 3)
    sizes = [space(params_with(optimizer__state_bits=bits), model).checkpoint for bits in (32, 8)]
    count = sum(parameter.numel() for parameter in model.parameters())
    assert math.isclose(sizes[0] - sizes[1], count * (BYTES[32] - BYTES[8]), abs_tol=1)


def test_a_disk_that_is_too_small_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = space(params_with(), models.build("resnet18", {}, 10, 3))
    usage = namedtuple("usage", "total used free")
    folder = tmp_path / "not" / "made yet"
    for free, existing, words in (
        (needed.checkpoints, 0, False),
        (needed.checkpoints - 1, 0, True),
        (needed.checkpoints - MIB, MIB, False),  # a training that is continued has some of it already
    ):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(0, 0, free))
        note_on_disk(needed, folder, existing)
        said = capsys.readouterr().out
        assert bool(said) is words
        if words:
            assert f"checkpoints: {folder} has room for" in said
            assert "(2 of 171 MiB, and one being written)" in said
