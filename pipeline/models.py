"""A model by name, what it starts from, and a saved one back. The only user of torchvision.models.

model, transform, classes = load_model("models")
logits = model(transform(images))          # images: uint8 (N, C, H, W)
"""

import difflib
import importlib
import inspect
import os
import re
import urllib.error
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline import files
from pipeline.errors import UserError

FOLDER = Path("models")
MADE_BY = "dvc repro train"


@dataclass(frozen=True)
class Transform:
    """uint8 (N, C, H, W) -> float32 as the model wants it: resized, channels repeated, normalised.

    size: pixels, square; channels: of the output; mean, std: a value a channel, of pixels in 0..1.
    """

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        pixels = images.float() / 255
        if pixels.shape[-2:] != (self.size, self.size):
            pixels = F.interpolate(pixels, (self.size, self.size), mode="bilinear", antialias=True)
        if pixels.shape[1] == 1 < self.channels:
            pixels = pixels.expand(-1, self.channels, -1, -1)
        mean = torch.tensor(self.mean, device=pixels.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).view(-1, 1, 1)
        return (pixels - mean) / std


class LoadedModel(NamedTuple):
    """A saved model, in evaluation mode, with what its images and its outputs mean."""

    model: nn.Module
    transform: Transform
    classes: list[str]


@dataclass(frozen=True)
class ImageSet:
    """What a model must know of the images: classes, channels, size in pixels, mean and std a channel."""

    classes: list[str]
    channels: int
    size: int
    mean: list[float]
    std: list[float]


def small_cnn(num_classes: int, in_channels: int = 1, width: int = 16) -> nn.Module:
    """Four 3 x 3 convolutions with GroupNorm, for images of 8 to 64 pixels.

    17,754 parameters at width 16 with one channel and ten classes.

    GroupNorm has no batch statistics, so the result does not depend on the micro-batch size.
    """

    def block(inputs: int, outputs: int) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.GroupNorm(8, outputs), nn.ReLU())

    return nn.Sequential(
        block(in_channels, width),
        block(width, width),
        nn.MaxPool2d(2),
        block(width, 2 * width),
        block(2 * width, 2 * width),
        QuarterMeans(),  # where strokes stand matters
        nn.Flatten(),
        nn.Linear(8 * width, num_classes),
    )


class QuarterMeans(nn.Module):
    """(N, C, H, W) -> (N, C, 2, 2): what AdaptiveAvgPool2d(2) gives, whose gradient varies on CUDA."""

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        halves = images[..., : (height + 1) // 2, :], images[..., height // 2 :, :]
        means = [
            quarter.mean((-2, -1))
            for half in halves
            for quarter in (half[..., : (width + 1) // 2], half[..., width // 2 :])
        ]
        return torch.stack(means, -1).unflatten(-1, (2, 2))


def torchvision_names() -> list[str]:
    """The classifiers of torchvision; quantized ones cannot be trained this way."""
    import torchvision

    return sorted(torchvision.models.list_models(module=torchvision.models))


def torchvision_sizes() -> dict[str, int]:
    """Parameters of each of torchvision's classifiers, as they come, for the 1,000 classes of ImageNet."""
    import torchvision

    weights = torchvision.models.get_model_weights
    return {name: int(weights(name).DEFAULT.meta["num_params"]) for name in torchvision_names()}


def kind(name: str) -> str:
    """classification; for models of torchvision that are planned and not trained, segmentation or video."""
    import torchvision

    zoo = torchvision.models
    for name_of_kind in ("segmentation", "video"):
        if name in zoo.list_models(module=getattr(zoo, name_of_kind)):
            return name_of_kind
    return "classification"


def build(name: str, args: dict[str, Any], num_classes: int, channels: int) -> nn.Module:
    """The named model with fresh weights: small_cnn, one of torchvision's or package.module:function.

    A function of your own is called as `function(num_classes=…, **args)`, with `in_channels=…` as well if
    it has such a parameter. Raises UserError for an unknown name or arguments that it does not take.
    """
    function = _function(name)
    given = {"num_classes": num_classes, **args}
    if "in_channels" in inspect.signature(function).parameters:
        given.setdefault("in_channels", channels)
    try:
        model = function(**given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"model {name} cannot be built with {given}: {error}; see model.args") from None
    if not isinstance(model, nn.Module):
        raise UserError(f"model.name {name} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _function(name: str) -> Callable[..., Any]:
    if name == "small_cnn":
        return small_cnn
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UserError(f"model.name {name} cannot be imported: {error}") from None
    known = torchvision_names()
    if name not in known and kind(name) == "classification":
        close = difflib.get_close_matches(name, ["small_cnn", *known], 5, 0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "for example resnet18 or vit_b_16"
        raise UserError(
            f"model.name: {name!r} is unknown; {hint} "
            f"(small_cnn, one of torchvision's {len(known)} classifiers, or package.module:function)"
        )
    import torchvision

    def of_torchvision(**args: Any) -> nn.Module:
        if kind(name) == "segmentation":
            args = {"weights_backbone": None, **args}
        if name in ("googlenet", "inception_v3"):  # their auxiliary heads return a second output
            args = {"aux_logits": False, "init_weights": True, **args}
        return torchvision.models.get_model(name, weights=None, **args)

    return of_torchvision


def prepare_transform(model: nn.Module, name: str, weights: str, images: ImageSet) -> Transform:
    """How this model wants these images: normalised as its weights expect, else by the training split.

    Grey images are repeated where the model's first convolution takes three channels. Raises UserError
    where the channels cannot be made to fit.
    """
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    wanted = first.in_channels if first is not None else images.channels
    if wanted != images.channels and images.channels != 1:
        raise UserError(f"model {name} takes {wanted} channels, the images have {images.channels}")
    mean, std = _normalisation_of(name, weights) or (images.mean, images.std)
    repeat = wanted if len(mean) == 1 else 1
    return Transform(images.size, wanted, tuple(mean) * repeat, tuple(std) * repeat)


def _normalisation_of(name: str, weights: str) -> tuple[list[float], list[float]] | None:
    """The mean and std that pretrained weights expect: as saved beside them, else as torchvision's."""
    if weights == "none":
        return None
    beside = Path(weights).parent / "model.json"
    if weights != "DEFAULT" and beside.is_file():
        transform = _transform_of(beside, read_description(beside))
        return list(transform.mean), list(transform.std)
    if name not in torchvision_names():
        return None
    import torchvision

    preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    return list(preset.mean), list(preset.std)


def check_forward(model: nn.Module, name: str, transform: Transform, num_classes: int) -> None:
    """Runs two blank images through; raises UserError where the model cannot take their size."""
    blank = torch.zeros(2, transform.channels, transform.size, transform.size, dtype=torch.uint8)
    model.eval()
    try:
        with torch.no_grad():
            outputs = model(transform(blank))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(
            f"model {name} cannot take images of {transform.size} x {transform.size} pixels ({error}); "
            "set data.image_size to what it was made for (224 for most), or its size in model.args"
        ) from None
    if not isinstance(outputs, Tensor) or outputs.shape != (2, num_classes):
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise UserError(f"model {name} gives {shape} for 2 images of {num_classes} classes, not (2, classes)")


def load_weights(model: nn.Module, name: str, weights: str, num_classes: int) -> list[str]:
    """Puts pretrained weights into the model; returns the names of what was left fresh: another head.

    weights: "none", "DEFAULT" (torchvision's best, downloaded once), or a .pth or .safetensors file.
    """
    if weights == "none":
        return []
    loaded = _default_weights(name) if weights == "DEFAULT" else _local_weights(Path(weights))
    own = model.state_dict()
    head = [
        key
        for key, tensor in own.items()
        if key in loaded and loaded[key].shape != tensor.shape and _is_head(tensor, loaded[key], num_classes)
    ]
    fitting = {key: tensor for key, tensor in loaded.items() if key not in head}
    problems = [f"{key} is missing" for key in own if key not in loaded]
    # auxiliary heads of googlenet and inception_v3 stand in the files and are not trained here
    problems += [
        f"{key} is not in the model" for key in loaded if key not in own and "aux" not in key.lower()
    ]
    problems += [
        f"{key} is {tuple(tensor.shape)}, the model's {tuple(own[key].shape)}"
        for key, tensor in fitting.items()
        if key in own and own[key].shape != tensor.shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"model.weights {weights} does not fit model {name}: {'; '.join(problems[:3])}{more}. "
            "Check model.name and model.args"
        )
    model.load_state_dict({**own, **{key: fitting[key] for key in own if key in fitting}})
    return head


def _is_head(own: Tensor, loaded: Tensor, num_classes: int) -> bool:
    """Shapes that differ in the first axis alone, the classes."""
    return own.ndim > 0 and own.shape[0] == num_classes and own.shape[1:] == loaded.shape[1:]


def _default_weights(name: str) -> dict[str, Tensor]:
    if name not in torchvision_names():
        raise UserError(f"model.weights DEFAULT: {name} has none; torchvision's classifiers have. Set none")
    import torchvision

    entry: Any = torchvision.models.get_model_weights(name).DEFAULT
    try:
        return entry.get_state_dict(progress=True, check_hash=True)
    except (urllib.error.URLError, OSError, RuntimeError) as error:
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        raise UserError(
            f"model.weights DEFAULT: {entry.url} could not be downloaded ({error}). Without a network: put "
            f"that file into {folder}, or anywhere and set model.weights to its path"
        ) from None


def _local_weights(path: Path) -> dict[str, Tensor]:
    """A state_dict from a file; no code in it is run."""
    if not path.is_file():
        raise UserError(
            f"model.weights: {path} does not exist; none, DEFAULT, or a .pth or .safetensors file"
        )
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever the bytes lead it to
        raise UserError(f"model.weights: {path} cannot be read as weights: {error}") from None
    if isinstance(loaded, dict) and all(isinstance(value, Tensor) for value in loaded.values()):
        return loaded
    raise UserError(f"model.weights: {path} holds no state_dict (names and tensors)")


def save_model(
    state: dict[str, Tensor],
    *,
    name: str,
    args: dict[str, Any],
    transform: Transform,
    images: ImageSet,
    micro_batch_size: int,
) -> None:
    """Writes models/model.safetensors and model.json, each whole or not at all, the description last.

    micro_batch_size: that the training ended with, which is smaller than planned after out of memory.
    """
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    with files.whole(FOLDER / "model.safetensors", size) as temporary:
        _save(tensors, temporary)
    description = {
        "name": name,
        "args": args,
        "classes": images.classes,
        "channels": images.channels,
        "transform": asdict(transform),
        "micro_batch_size": micro_batch_size,
        "sha256": files.sha256(FOLDER / "model.safetensors"),
    }
    files.write_json(FOLDER / "model.json", description)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """safetensors' save_file, with the system's error for what it tells in words: "(os error 28)"."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from None


def load_model(folder: str | Path = FOLDER, *, own_code: str = "") -> LoadedModel:
    """The saved model, rebuilt from its two files; raises UserError when one is missing or damaged.

    own_code: the package.module:function that the model may be built with. Without it, code of that kind is
    refused: model.json may come from anybody, and importing what it names would run it.
    """
    folder = Path(folder)
    description = read_description(folder / "model.json")
    transform = _transform_of(folder / "model.json", description)
    name, classes = description["name"], description["classes"]
    if ":" in name and name != own_code:
        raise UserError(
            f"{folder / 'model.json'} asks to run {name}: if you trust it, load it with own_code={name!r} "
            "(the stages do where model.name says so)"
        )
    path = folder / "model.safetensors"
    if not path.is_file() or files.sha256(path) != description["sha256"]:
        raise UserError(
            f"{path} is missing or not the file that model.json describes: run `{MADE_BY}` or `dvc checkout`"
        )
    model = build(name, description["args"], len(classes), description["channels"])
    try:
        model.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        raise UserError(f"{path} does not fit model {name}: {error}") from None
    return LoadedModel(model.eval(), transform, classes)


def read_description(path: Path) -> dict[str, Any]:
    """model.json; raises UserError where it is missing or something else."""
    fields = {"name": str, "args": dict, "classes": list, "channels": int, "transform": dict, "sha256": str}
    return files.read_json(path, MADE_BY, fields)


def _transform_of(path: Path, description: dict[str, Any]) -> Transform:
    parts = description["transform"]
    try:
        mean, std = (tuple(float(value) for value in parts[name]) for name in ("mean", "std"))
        transform = Transform(int(parts["size"]), int(parts["channels"]), mean, std)
        if transform.size < 1 or not len(mean) == len(std) == transform.channels:
            raise ValueError("a mean and a std a channel")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: its transform is none ({error!r}): run `{MADE_BY}` again") from None
    return transform
