import json
from pathlib import Path

import pytest
import torch
from hostile import Touch, no_file_over
from safetensors.torch import save_file
from torch import nn

from pipeline import files, models
from pipeline.errors import UserError
from pipeline.models import ImageSet, Transform

GREY = ImageSet([str(digit) for digit in range(10)], channels=1, size=8, mean=[0.3], std=[0.4])


def digits_like(count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 1, 8, 8), generator=generator, dtype=torch.uint8)


def test_small_cnn_has_the_parameters_its_docstring_names() -> None:
    count = sum(parameter.numel() for parameter in models.small_cnn(10).parameters())
    assert f"{count:,} parameters at width 16" in (models.small_cnn.__doc__ or "")


@pytest.mark.parametrize("size", [8, 28, 64])
def test_small_cnn_takes_small_images_of_any_size(size: int) -> None:
    assert models.small_cnn(7, in_channels=3)(torch.zeros(2, 3, size, size)).shape == (2, 7)


def test_the_transform_normalises_repeats_and_resizes() -> None:
    images = digits_like()
    same = Transform(8, 1, (0.25,), (0.5,))(images)
    torch.testing.assert_close(same, (images.float() / 255 - 0.25) / 0.5)
    wide = Transform(8, 3, (0.0, 0.25, 0.5), (1.0, 1.0, 2.0))(images)
    torch.testing.assert_close(wide[:, 2:], (images.float() / 255 - 0.5) / 2)
    flat = torch.full((1, 1, 8, 8), 51, dtype=torch.uint8)
    torch.testing.assert_close(Transform(20, 1, (0.0,), (1.0,))(flat), torch.full((1, 1, 20, 20), 0.2))


def test_an_unknown_name_lists_the_close_ones() -> None:
    with pytest.raises(UserError, match=r"'vit_b16' is unknown; did you mean vit_b_16"):
        models.build("vit_b16", {}, 10, 1)


def test_arguments_that_a_model_does_not_take_are_refused() -> None:
    with pytest.raises(UserError, match=r"widht.*see model\.args"):
        models.build("small_cnn", {"widht": 3}, 10, 1)


def test_an_own_model_gets_the_channels_if_it_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ownnet.py").write_text(
        "from torch import nn\n"
        "def asks(num_classes, in_channels, width=2):\n"
        "    convolution = nn.Conv2d(in_channels, width, 8)\n"
        "    return nn.Sequential(convolution, nn.Flatten(), nn.Linear(width, num_classes))\n"
        "def plain(num_classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
        "def wrong(num_classes):\n    return num_classes\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert models.build("ownnet:asks", {"width": 5}, 4, 1)[0].weight.shape == (5, 1, 8, 8)
    assert models.build("ownnet:plain", {}, 4, 1)(torch.zeros(2, 1, 8, 8)).shape == (2, 4)
    with pytest.raises(UserError, match=r"returned a int"):
        models.build("ownnet:wrong", {}, 4, 1)
    with pytest.raises(UserError, match="cannot be imported"):
        models.build("ownnet:absent", {}, 4, 1)


def test_torchvision_takes_grey_images_repeated() -> None:
    model = models.build("resnet18", {}, 10, 1)
    transform = models.prepare_transform(model, "resnet18", "none", GREY)
    assert transform == Transform(8, 3, (0.3,) * 3, (0.4,) * 3)
    models.check_forward(model, "resnet18", transform, 10)


def test_a_size_that_the_model_cannot_take_says_what_to_set() -> None:
    model = models.build("vit_b_32", {}, 10, 1)
    transform = models.prepare_transform(model, "vit_b_32", "none", GREY)
    with pytest.raises(UserError, match=r"cannot take images of 8 x 8 pixels.*set data\.image_size"):
        models.check_forward(model, "vit_b_32", transform, 10)


def test_channels_that_do_not_fit_are_refused() -> None:
    colour = ImageSet(["a", "b"], channels=4, size=8, mean=[0.0] * 4, std=[1.0] * 4)
    with pytest.raises(UserError, match="takes 3 channels, the images have 4"):
        models.prepare_transform(models.build("resnet18", {}, 2, 4), "resnet18", "none", colour)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A small_cnn with weights of its own, saved in models/ of a temporary folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    model = models.build("small_cnn", {"width": 8}, 10, 1).eval()
    transform = models.prepare_transform(model, "small_cnn", "none", GREY)
    models.save_model(
        model.state_dict(),
        name="small_cnn",
        args={"width": 8},
        transform=transform,
        images=GREY,
        micro_batch_size=4,
    )
    return model


def test_a_saved_model_comes_back_with_all_that_is_needed_to_use_it(saved: nn.Module) -> None:
    loaded = models.load_model("models")
    assert loaded.classes == GREY.classes
    assert not loaded.model.training
    images = digits_like()
    assert torch.equal(loaded.model(loaded.transform(images)), saved(loaded.transform(images)))


def test_the_same_weights_give_the_same_bytes(saved: nn.Module) -> None:
    paths = [Path("models/model.safetensors"), Path("models/model.json")]
    before = [path.read_bytes() for path in paths]
    state = dict(reversed(list(saved.state_dict().items())))
    transform = models.load_model().transform
    models.save_model(
        state, name="small_cnn", args={"width": 8}, transform=transform, images=GREY, micro_batch_size=4
    )
    assert [path.read_bytes() for path in paths] == before


@pytest.mark.parametrize("size", [(4, 4), (5, 7), (2, 3), (1, 1)])
def test_quarter_means_are_adaptive_average_pooling(size: tuple[int, int]) -> None:
    images = torch.rand(2, 3, *size, dtype=torch.float64, requires_grad=True)
    weights = torch.arange(4.0).view(2, 2)
    pooled, expected = models.QuarterMeans()(images), torch.nn.AdaptiveAvgPool2d(2)(images)
    torch.testing.assert_close(pooled, expected)
    torch.testing.assert_close(
        torch.autograd.grad((pooled * weights).sum(), images),
        torch.autograd.grad((expected * weights).sum(), images),
    )


@pytest.mark.usefixtures("saved")
def test_damaged_or_missing_weights_are_refused() -> None:
    path = Path("models/model.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-4] + b"\0\0\0\1")
    with pytest.raises(UserError, match=r"not the file that model\.json describes"):
        models.load_model()
    path.unlink()
    with pytest.raises(UserError, match="is missing or not"):
        models.load_model()


@pytest.mark.usefixtures("saved")
def test_a_description_runs_no_code_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom pipeline.models import small_cnn as net\n"
    )
    path = Path("models/model.json")
    files.write_json(path, json.loads(path.read_text()) | {"name": "evil:net"})
    with pytest.raises(UserError, match=r"asks to run evil:net.*own_code='evil:net'"):
        models.load_model()
    with pytest.raises(UserError, match="asks to run"):
        models.load_model(own_code="other:net")
    assert not (tmp_path / "ran").exists()
    assert len(models.load_model(own_code="evil:net").classes) == 10
    assert (tmp_path / "ran").exists()


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize(
    "changes",
    [
        {"name": None},
        {"classes": 3},
        {"transform": {}},
        {"transform": {"size": 8, "channels": 1, "mean": [1]}},
    ],
    ids=str,
)
def test_a_description_of_something_else_is_refused(changes: dict[str, object]) -> None:
    path = Path("models/model.json")
    files.write_json(path, json.loads(path.read_text()) | changes)
    with pytest.raises(UserError, match=r"model\.json.*run `dvc repro train`"):
        models.load_model()


@pytest.mark.usefixtures("saved")
def test_a_full_disk_leaves_the_model_before() -> None:
    before = models.load_model().model.state_dict()
    other = {name: tensor + 1 for name, tensor in before.items()}
    transform = Transform(8, 1, (0.3,), (0.4,))
    message = r"File too large \([\d.,]+ MiB free, \d\.\d MiB needed\): 'models/model\.safetensors'"
    with no_file_over(1000), pytest.raises(OSError, match=message):
        models.save_model(
            other, name="small_cnn", args={"width": 8}, transform=transform, images=GREY, micro_batch_size=4
        )
    for name, tensor in models.load_model().model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_local_weights_replace_all_but_a_head_of_another_size(tmp_path: Path) -> None:
    source = models.build("resnet18", {}, 1000, 3)
    torch.save(source.state_dict(), tmp_path / "w.pth")
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    for name in ("w.pth", "w.safetensors"):
        model = models.build("resnet18", {}, 10, 3)
        head = model.fc.weight.clone()
        weights = str(tmp_path / name)
        assert models.load_weights(model, "resnet18", weights, 10) == ["fc.weight", "fc.bias"]
        assert torch.equal(model.conv1.weight, source.conv1.weight)
        assert torch.equal(model.fc.weight, head)
        transform = models.prepare_transform(model, "resnet18", weights, GREY)
        assert transform.mean == (0.485, 0.456, 0.406)
    same_size = models.build("resnet18", {}, 1000, 3)
    assert models.load_weights(same_size, "resnet18", str(tmp_path / "w.pth"), 1000) == []
    assert torch.equal(same_size.fc.weight, source.fc.weight)


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    torch.save(models.build("resnet18", {}, 10, 3).state_dict(), tmp_path / "w.pth")
    model = models.build("resnet34", {}, 10, 3)
    with pytest.raises(UserError, match=r"does not fit model resnet34: layer1\.2\.conv1\.weight is missing"):
        models.load_weights(model, "resnet34", str(tmp_path / "w.pth"), 10)


@pytest.mark.usefixtures("saved")
def test_own_weights_bring_the_normalisation_that_was_saved_beside_them() -> None:
    other = ImageSet(GREY.classes, channels=1, size=8, mean=[0.9], std=[0.1])
    model = models.build("small_cnn", {"width": 8}, 10, 1)
    transform = models.prepare_transform(model, "small_cnn", "models/model.safetensors", other)
    assert (transform.mean, transform.std) == ((0.3,), (0.4,))


def test_a_hostile_weights_file_runs_no_code(tmp_path: Path) -> None:
    torch.save({"weight": Touch(tmp_path / "ran")}, tmp_path / "w.pth")
    with pytest.raises(UserError, match="cannot be read as weights"):
        models.load_weights(models.small_cnn(10), "small_cnn", str(tmp_path / "w.pth"), 10)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"text", None])
def test_a_file_that_is_no_weights_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "w.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"w\.safetensors (cannot be read|does not exist)"):
        models.load_weights(models.small_cnn(10), "small_cnn", str(path), 10)


def test_default_weights_without_a_network_say_where_to_put_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    import urllib.error

    def unreachable(*args: object, **kwargs: object) -> None:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("torch.hub.download_url_to_file", unreachable)
    monkeypatch.setattr("torch.hub.get_dir", lambda: "/nowhere/hub")
    with pytest.raises(
        UserError, match=r"resnet18-.*\.pth could not be downloaded.*into /nowhere/hub/checkpoints"
    ):
        models.load_weights(models.build("resnet18", {}, 10, 3), "resnet18", "DEFAULT", 10)
    with pytest.raises(UserError, match="small_cnn has none"):
        models.load_weights(models.small_cnn(10), "small_cnn", "DEFAULT", 10)
