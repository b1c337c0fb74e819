"""From params.yaml to a trainer: each key has the effect that it names."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from pipeline import config, models
from pipeline.data import prepared
from pipeline.data.sources import Labelled
from pipeline.engine import Trainer, WeightAverage
from pipeline.errors import UserError
from pipeline.stages.best import Best
from pipeline.stages.setup import (
    build_forward,
    build_loss,
    build_model,
    build_trainer,
    image_set,
    note_on_split,
    without_deterministic_kernel,
)

COUNTS = (16, 4)  # training samples of the two classes


@pytest.fixture
def data(tmp_path: Path) -> prepared.Prepared:
    """Twenty training images of two unequal classes, 8 x 8, grey."""
    generator = np.random.default_rng(0)
    labels = np.array([0] * COUNTS[0] + [1] * COUNTS[1] + [0, 1, 0, 1])
    images = generator.integers(0, 256, (len(labels), 1, 8, 8), dtype=np.uint8)
    parts = {"train": np.arange(20), "validation": np.arange(20, 22), "test": np.arange(22, 24)}
    prepared.write(Labelled(images, labels, ["cat", "dog"]), parts, "made up", tmp_path / "prepared")
    return prepared.open_prepared(tmp_path / "prepared")


@pytest.fixture
def built(data: prepared.Prepared) -> Callable[..., Trainer]:
    def build(**changes: Any) -> Trainer:
        """changes: dotted keys, with __ for the dot."""
        values = yaml.safe_load(Path("params.yaml").read_text())
        values["precision"] = "fp32"
        values["memory"]["savers"] = []
        for name, value in changes.items():
            section, _, key = name.partition("__")
            values[section][key] = value
        params = config.parse(yaml.safe_dump(values))
        torch.manual_seed(0)
        model, transform, _ = build_model(params, image_set(data))
        forward, loss = build_forward(params, model, transform), build_loss(params, data)
        return build_trainer(params, model, forward, loss, total_steps=10)

    return build


def window(data: prepared.Prepared) -> dict[str, torch.Tensor]:
    split = data.splits["train"]
    return {
        "images": torch.from_numpy(np.array(split.images)),
        "labels": torch.from_numpy(split.labels),
        "ids": torch.arange(100, 120),
    }


def test_balanced_class_weights_make_the_classes_weigh_alike(
    built: Callable[..., Trainer], data: prepared.Prepared
) -> None:
    loss = built(loss__class_weights="balanced").loss
    assert loss.class_weights.tolist() == [20 / (2 * 16), 20 / (2 * 4)]
    assert built(loss__class_weights=[1.0, 3.0]).loss.class_weights.tolist() == [1.0, 3.0]
    assert built().loss.class_weights is None
    assert built(loss__class_weights="balanced").step(window(data)).applied


def test_class_weights_for_other_classes_and_for_another_loss_are_refused(
    built: Callable[..., Trainer],
) -> None:
    with pytest.raises(UserError, match="3 numbers for 2 classes; give one a class: cat dog"):
        built(loss__class_weights=[1.0, 2.0, 3.0])
    with pytest.raises(UserError, match="belong to cross_entropy"):
        built(loss__class_weights="balanced", loss__name="torch:mean", loss__label_smoothing=0.0)


@pytest.mark.parametrize("wrong", [2.0, [], [0, 0], [1.0, -1.0], ["a"], "even", {"cat": 1.0}])
def test_class_weights_that_are_none_are_refused(built: Callable[..., Trainer], wrong: Any) -> None:
    with pytest.raises(
        UserError, match=r"loss\.class_weights: .* allowed: none balanced or a list of numbers"
    ):
        built(loss__class_weights=wrong)


def test_frozen_parameters_stay(built: Callable[..., Trainer], data: prepared.Prepared) -> None:
    trainer = built(model__freeze=["0.*"])
    frozen = [parameter.detach().clone() for parameter in trainer.model[0].parameters()]
    assert trainer.step(window(data)).applied
    assert all(map(torch.equal, frozen, trainer.model[0].parameters()))
    with pytest.raises(UserError, match=r"'encoder\.\*' matches no parameter"):
        built(model__freeze=["encoder.*"])


def test_channels_last_gives_the_same_model_and_saves_it(
    built: Callable[..., Trainer],
    data: prepared.Prepared,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainers = [built(execution__channels_last=value) for value in (False, True)]
    results = [trainer.step(window(data)) for trainer in trainers]
    assert trainers[1].model[0][0].weight.is_contiguous(memory_format=torch.channels_last)
    assert results[1].loss == pytest.approx(results[0].loss, rel=1e-5)
    best = Best("last")
    best.consider(trainers[1].model, 0.5, 1, trainers[1].average)
    images = image_set(data)
    transform = models.prepare_transform(trainers[1].model, "small_cnn", "none", images)
    monkeypatch.setattr(models, "FOLDER", tmp_path)
    models.save_model(
        best.finite_weights(),
        name="small_cnn",
        args={},
        transform=transform,
        images=images,
        micro_batch_size=4,
    )
    saved = models.load_model(tmp_path).model.state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in trainers[1].model.state_dict().items())


def test_a_weight_that_is_not_finite_is_never_saved() -> None:
    best, model = Best("best"), nn.Linear(2, 2)
    nn.init.constant_(model.bias, torch.inf)
    best.consider(model, 0.9, 1, WeightAverage(model, 0))
    with pytest.raises(UserError, match=r"not finite \(bias\)"):
        best.finite_weights()


def test_the_best_epoch_is_kept_the_earlier_on_a_tie_or_else_the_last() -> None:
    model = nn.Linear(1, 1)
    for save, epoch in (("best", 2), ("last", 4)):
        best = Best(save)
        for number, accuracy in enumerate([0.5, 0.7, 0.7, 0.6], start=1):
            nn.init.constant_(model.bias, number)
            best.consider(model, accuracy, number, WeightAverage(model, 0))
        assert (best.epoch, float(best.finite_weights()["bias"])) == (epoch, epoch)


def test_of_averaged_weights_the_average_is_kept() -> None:
    model = nn.Linear(1, 1)
    average = WeightAverage(model, 0.5)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
    average.update()
    best = Best("best")
    best.consider(model, 0.9, 1, average)
    assert torch.equal(best.finite_weights()["weight"], before + 0.5)
    assert torch.equal(model.weight, before + 1)


def test_the_ids_of_the_samples_are_those_of_the_loader(
    built: Callable[..., Trainer], data: prepared.Prepared
) -> None:
    assert [int(one) for one in built().sample_ids(window(data))] == list(range(100, 120))


def test_compiling_needs_a_compiler_and_then_gives_the_same(
    built: Callable[..., Trainer], data: prepared.Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    eager, compiled = built().step(window(data)), built(execution__compile=True).step(window(data))
    assert compiled.loss == pytest.approx(eager.loss, rel=1e-4)
    assert compiled.grad_norm == pytest.approx(eager.grad_norm, rel=1e-3)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="needs a C"):
        built(execution__compile=True)


def test_what_depends_on_the_split_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    note_on_split(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)))
    assert "has batch statistics, dropout" in capsys.readouterr().out
    note_on_split(nn.Linear(2, 2))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "named"),
    [("small_cnn", []), ("resnet18", []), ("vit_b_32", []), ("alexnet", ["AdaptiveAvgPool2d"])],
)
def test_what_cuda_has_no_deterministic_kernel_for_is_known_before_training(
    name: str, named: list[str]
) -> None:
    params = config.parse(config.overridden(Path("params.yaml").read_text(), [f"model.name={name}"]))
    images = models.ImageSet([str(i) for i in range(10)], channels=3, size=224, mean=[0.5] * 3, std=[0.2] * 3)
    assert without_deterministic_kernel(params, images) == named
