"""Train, validation and test: stratified (each class in proportion) and seeded."""

import numpy as np
from sklearn.model_selection import train_test_split

from pipeline.data.sources import Labelled
from pipeline.errors import UserError


def split(labelled: Labelled, *, validation: float, test: float, seed: int) -> dict[str, np.ndarray]:
    """Sorted indices of "train", "validation" and "test", disjoint, together all.

    `validation` and `test` are fractions of all images; where the source has a test split of its own,
    that is the test and `validation` is a fraction of the rest.
    """
    every = np.arange(len(labelled.labels))
    if labelled.official_test is None:
        rest, testing = _stratified(every, labelled, test, seed)
        share = validation / (1 - test)
    else:
        testing = np.sort(labelled.official_test)
        rest = np.setdiff1d(every, testing)
        share = validation
    training, validating = _stratified(rest, labelled, share, seed)
    return {"train": training, "validation": validating, "test": testing}


def _stratified(
    indices: np.ndarray, labelled: Labelled, fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    labels = labelled.labels[indices]
    present, counts = np.unique(labels, return_counts=True)
    taken = round(len(indices) * fraction)
    if counts.min() < 2 or not len(present) <= taken <= len(indices) - len(present):
        raise UserError(
            f"a split of {fraction:.3g} of {len(indices)} images cannot hold each of the {len(present)} "
            f"classes on both sides; the smallest class, {labelled.classes[present[counts.argmin()]]}, has "
            f"{counts.min()} images. Change data.validation_fraction or data.test_fraction, or add images"
        )
    kept, drawn = train_test_split(indices, test_size=taken, stratify=labels, random_state=seed)
    return np.sort(kept), np.sort(drawn)
