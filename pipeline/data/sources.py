"""Where images come from. A source is a function that returns `Labelled`; adding one is a function here.

A source of your own is `package.module:function` in `data.source`: it takes nothing and returns the same.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.errors import UserError


@dataclass(frozen=True)
class Labelled:
    """Images (N, C, H, W) uint8, labels (N,) integers from 0, and the classes' names in that order.

    `official_test` holds the indices of the source's own test split, None where it brings none.
    """

    images: np.ndarray
    labels: np.ndarray
    classes: list[str]
    official_test: np.ndarray | None = None


def digits() -> Labelled:
    """1,797 handwritten digits, 8 x 8, grey (UCI Optical Recognition of Handwritten Digits, test part).

    They come with scikit-learn, so no network is needed. Pixels of 0 to 16 are stretched to 0 to 255.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = np.rint(pixels.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    return Labelled(images, labels.astype(np.int64), [str(digit) for digit in range(10)])


SOURCES: dict[str, Callable[[], Labelled]] = {"digits": digits}


def read(name: str) -> Labelled:
    """The named source's images; raises UserError for one that cannot be found or is not as it must be."""
    function = SOURCES.get(name) or _own(name)
    labelled = function()
    if not isinstance(labelled, Labelled):
        raise UserError(f"data.source {name} returned a {type(labelled).__name__}, not a Labelled")
    _check(labelled, name)
    return labelled


def _own(reference: str) -> Callable[[], Labelled]:
    module, _, name = reference.partition(":")
    try:
        function: Callable[[], Labelled] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"data.source {reference} cannot be imported: {error}") from None
    return function


def _check(labelled: Labelled, name: str) -> None:
    images, labels, classes = labelled.images, labelled.labels, labelled.classes
    problems = []
    if images.dtype != np.uint8 or images.ndim != 4:
        problems.append(f"images are {images.dtype} {images.shape}, not uint8 (N, C, H, W)")
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) != len(images):
        problems.append(f"labels are {labels.dtype} {labels.shape}, not one integer an image")
    elif len(labels) == 0:
        problems.append("it has no images")
    elif labels.min() < 0 or labels.max() >= len(classes):
        problems.append(f"labels run from {labels.min()} to {labels.max()}, classes are {len(classes)}")
    if problems:
        raise UserError(f"data.source {name}: " + "; ".join(problems))
