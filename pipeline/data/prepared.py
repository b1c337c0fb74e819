"""The prepared data set on disk: the one place that knows its layout.

data/prepared/
  dataset.json                what it is: source, classes, counts, shape, mean and std, sha256 of each file
  train_images.npy            uint8 (N, C, H, W), to be memory-mapped
  train_labels.npy            int64 (N,)
  validation_….npy  test_….npy
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import files
from pipeline.data.sources import Labelled
from pipeline.errors import UserError

FOLDER = Path("data/prepared")
SPLITS = ("train", "validation", "test")
MADE_BY = "dvc repro prepare"
FIELDS = {
    "source": str,
    "classes": list,
    "shape": list,
    "counts": dict,
    "counts_by_class": dict,
    "mean": list,
    "std": list,
    "sha256": dict,
}


@dataclass(frozen=True)
class Split:
    """Images (N, C, H, W) uint8, memory-mapped, and labels (N,) int64."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Prepared:
    """An opened data set; `description` is dataset.json."""

    description: dict[str, Any]
    splits: dict[str, Split]

    @property
    def classes(self) -> list[str]:
        return list(self.description["classes"])

    @property
    def channels(self) -> int:
        return int(self.description["shape"][0])

    @property
    def image_size(self) -> int:
        return int(self.description["shape"][1])


def write(
    labelled: Labelled, splits: dict[str, np.ndarray], source: str, folder: Path = FOLDER
) -> dict[str, Any]:
    """Writes the set, whole or not at all; returns its description. The same input gives the same bytes."""
    with files.whole(folder) as temporary:
        temporary.mkdir()
        digests = {}
        for split, indices in splits.items():
            for part, array in (("images", labelled.images), ("labels", labelled.labels)):
                path = temporary / f"{split}_{part}.npy"
                np.save(path, np.ascontiguousarray(array[indices]))
                digests[path.name] = files.sha256(path)
        description = describe(labelled, splits, source) | {"sha256": digests}
        files.write_json(temporary / "dataset.json", description)
    return description


def describe(labelled: Labelled, splits: dict[str, np.ndarray], source: str) -> dict[str, Any]:
    """What dataset.json says of the set, but for the digests of its files."""
    mean, std = channel_statistics(labelled.images[splits["train"]])
    return {
        "source": source,
        "classes": labelled.classes,
        "shape": list(labelled.images.shape[1:]),
        "counts": {split: len(indices) for split, indices in splits.items()},
        "counts_by_class": {
            split: np.bincount(labelled.labels[indices], minlength=len(labelled.classes)).tolist()
            for split, indices in splits.items()
        },
        "mean": mean,
        "std": std,
    }


def read_description(folder: Path = FOLDER) -> dict[str, Any]:
    """dataset.json; raises UserError where it is missing or damaged."""
    return files.read_json(folder / "dataset.json", MADE_BY, FIELDS)


def open_prepared(folder: Path = FOLDER) -> Prepared:
    """Opens the set and checks each file's digest; raises UserError that names what is missing or damaged."""
    description = read_description(folder)
    splits = {split: _split(folder, split, description) for split in SPLITS}
    return Prepared(description, splits)


def _split(folder: Path, split: str, description: dict[str, Any]) -> Split:
    images, labels = (
        _open(folder / name, description["sha256"].get(name))
        for name in (f"{split}_images.npy", f"{split}_labels.npy")
    )
    if (
        (images.dtype, images.shape) != (np.uint8, (len(labels), *description["shape"]))
        or (labels.dtype, labels.ndim) != (np.int64, 1)
        or (len(labels) and not 0 <= labels.min() <= labels.max() < len(description["classes"]))
    ):
        raise UserError(
            f"{folder}: images {images.dtype} {images.shape} and labels {labels.dtype} {labels.shape} of "
            f"{split} are not what dataset.json describes: remove {folder} and run `{MADE_BY}`"
        )
    return Split(images, np.array(labels))


def _open(path: Path, digest: str | None) -> np.ndarray:
    """The array of a file, memory-mapped, if the file has that sha256; raises UserError."""
    if not path.is_file():
        raise UserError(f"{path} is missing: run `{MADE_BY}` (or `dvc checkout`) to have it again")
    try:
        if files.sha256(path) != digest:
            raise ValueError("sha256 differs: truncated or changed")
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise UserError(
            f"{path} is not the file that was prepared ({error}): remove {path.parent} and run `{MADE_BY}` "
            "(or `dvc checkout`)"
        ) from None
    return array


def channel_statistics(images: np.ndarray) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, of pixels scaled to 0..1; exact, from integer sums.

    images: (N, C, H, W) uint8. A constant channel gets a deviation of 1, so that it can be divided by.
    """
    channels = images.shape[1]
    count = images.size // channels
    histograms = [np.bincount(images[:, channel].ravel(), minlength=256) for channel in range(channels)]
    values = np.arange(256)
    means = [int((histogram * values).sum()) / count for histogram in histograms]
    squares = [int((histogram * values**2).sum()) / count for histogram in histograms]
    deviations = [max(0.0, square - mean**2) ** 0.5 for square, mean in zip(squares, means, strict=True)]
    return [mean / 255 for mean in means], [deviation / 255 or 1.0 for deviation in deviations]


def summary(description: dict[str, Any]) -> str:
    """One line for a person: "digits: 1,257 train, 270 validation, 270 test; 10 classes, 1 x 8 x 8"."""
    counts = ", ".join(f"{count:,} {split}" for split, count in description["counts"].items())
    shape = " x ".join(str(size) for size in description["shape"])
    return f"{description['source']}: {counts}; {len(description['classes'])} classes, {shape}"
