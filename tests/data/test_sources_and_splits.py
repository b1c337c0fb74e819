from pathlib import Path

import numpy as np
import pytest

from pipeline.data import sources, splits
from pipeline.data.sources import Labelled
from pipeline.errors import UserError


def labelled(counts: list[int]) -> Labelled:
    labels = np.repeat(np.arange(len(counts)), counts)
    images = np.zeros((len(labels), 1, 2, 2), np.uint8)
    return Labelled(images, labels, [f"class {index}" for index in range(len(counts))])


def test_the_digits_are_all_there_with_the_full_range_of_a_byte() -> None:
    digits = sources.read("digits")
    assert digits.images.shape == (1797, 1, 8, 8)
    assert digits.images.dtype == np.uint8
    assert (digits.images.min(), digits.images.max()) == (0, 255)
    assert np.bincount(digits.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_an_own_source_is_read_and_a_wrong_one_explained(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "ownset.py").write_text(
        "import numpy as np\nfrom pipeline.data.sources import Labelled\n"
        "def good():\n"
        "    return Labelled(np.zeros((4, 3, 5, 5), np.uint8), np.array([0, 1, 0, 1]), ['a', 'b'])\n"
        "def floats():\n    return Labelled(np.zeros((4, 3, 5, 5)), np.array([0, 1, 0, 2]), ['a', 'b'])\n"
        "def other():\n    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert sources.read("ownset:good").images.shape == (4, 3, 5, 5)
    with pytest.raises(UserError, match=r"float64.*not uint8.*labels run from 0 to 2, classes are 2"):
        sources.read("ownset:floats")
    with pytest.raises(UserError, match="returned a int"):
        sources.read("ownset:other")
    with pytest.raises(UserError, match="cannot be imported"):
        sources.read("ownset:absent")


def test_splits_are_disjoint_complete_stratified_and_seeded() -> None:
    data = labelled([100, 50, 31])
    parts = splits.split(data, validation=0.2, test=0.1, seed=3)
    joined = np.concatenate(list(parts.values()))
    assert sorted(joined.tolist()) == list(range(181))
    for split, share in (("validation", 0.2), ("test", 0.1), ("train", 0.7)):
        counts = np.bincount(data.labels[parts[split]], minlength=3)
        assert np.abs(counts - share * np.array([100, 50, 31])).max() <= 1, split
    again = splits.split(data, validation=0.2, test=0.1, seed=3)
    other = splits.split(data, validation=0.2, test=0.1, seed=4)
    assert all(np.array_equal(parts[name], again[name]) for name in parts)
    assert not np.array_equal(parts["test"], other["test"])


def test_a_sources_own_test_split_is_the_test() -> None:
    data = labelled([40, 40])
    official = np.array([3, 1, 50, 60])
    data = Labelled(data.images, data.labels, data.classes, official)
    parts = splits.split(data, validation=0.25, test=0.5, seed=0)
    assert parts["test"].tolist() == [1, 3, 50, 60]
    assert (len(parts["validation"]), len(parts["train"])) == (19, 57)


def test_a_class_that_is_too_small_is_named() -> None:
    with pytest.raises(UserError, match="class 1, has 1 images"):
        splits.split(labelled([40, 1]), validation=0.2, test=0.2, seed=0)
