import json
from pathlib import Path

import numpy as np
import pytest
from hostile import Touch

from pipeline import files
from pipeline.data import prepared
from pipeline.data.sources import Labelled
from pipeline.errors import UserError


def describe_anew(folder: Path, **changes: object) -> None:
    """dataset.json with changes, and digests that hold."""
    path = folder / "dataset.json"
    digests = {each.name: files.sha256(each) for each in folder.glob("*.npy")}
    files.write_json(path, json.loads(path.read_text()) | {"sha256": digests} | changes)


@pytest.fixture
def data() -> Labelled:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (30, 3, 4, 4), dtype=np.uint8)
    return Labelled(images, np.arange(30) % 3, ["a", "b", "c"])


@pytest.fixture
def folder(tmp_path: Path, data: Labelled) -> Path:
    parts = {"train": np.arange(20), "validation": np.arange(20, 25), "test": np.arange(25, 30)}
    prepared.write(data, parts, "mine", tmp_path / "set")
    return tmp_path / "set"


def test_what_is_written_is_read_again(folder: Path, data: Labelled) -> None:
    opened = prepared.open_prepared(folder)
    assert opened.classes == ["a", "b", "c"]
    assert (opened.channels, opened.image_size) == (3, 4)
    assert opened.description["counts"] == {"train": 20, "validation": 5, "test": 5}
    assert opened.description["counts_by_class"]["train"] == [7, 7, 6]
    test = opened.splits["test"]
    assert isinstance(test.images, np.memmap)
    assert np.array_equal(test.images, data.images[25:])
    assert np.array_equal(test.labels, data.labels[25:])


def test_the_same_input_gives_the_same_bytes(folder: Path, tmp_path: Path, data: Labelled) -> None:
    parts = {"train": np.arange(20), "validation": np.arange(20, 25), "test": np.arange(25, 30)}
    prepared.write(data, parts, "mine", tmp_path / "again")
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_mean_and_std_are_those_of_the_training_split_in_float64(folder: Path, data: Labelled) -> None:
    pixels = data.images[:20].astype(np.float64) / 255
    description = prepared.open_prepared(folder).description
    np.testing.assert_allclose(description["mean"], pixels.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(description["std"], pixels.std((0, 2, 3)), rtol=1e-10)


def test_a_constant_channel_can_be_divided_by() -> None:
    assert prepared.channel_statistics(np.full((2, 1, 3, 3), 51, np.uint8)) == ([0.2], [1.0])


def test_damage_is_found_and_the_file_named(folder: Path) -> None:
    path = folder / "validation_labels.npy"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"validation_labels\.npy is not the file that was prepared"):
            prepared.open_prepared(folder)
    path.unlink()
    with pytest.raises(UserError, match=r"validation_labels\.npy is missing: run `dvc repro prepare`"):
        prepared.open_prepared(folder)


@pytest.mark.parametrize(
    "changes",
    [{"shape": [1, 4, 4]}, {"classes": ["a"]}, {"sha256": {}}, {"sha256": []}, {"counts": None}],
    ids=str,
)
def test_a_description_of_something_else_is_refused(folder: Path, changes: dict[str, object]) -> None:
    describe_anew(folder, **changes)
    with pytest.raises(UserError, match=r"run `dvc repro prepare`"):
        prepared.open_prepared(folder)


@pytest.mark.parametrize("labels", [np.arange(4), np.zeros(5), np.full(5, -1), np.zeros((5, 1), np.int64)])
def test_labels_that_are_none_are_refused(folder: Path, labels: np.ndarray) -> None:
    np.save(folder / "test_labels.npy", labels)
    describe_anew(folder)
    with pytest.raises(UserError, match=r"of test are not what dataset\.json describes"):
        prepared.open_prepared(folder)


def test_a_hostile_array_runs_no_code(folder: Path, tmp_path: Path) -> None:
    hostile = np.array([Touch(tmp_path / "ran")], dtype=object)
    np.save(folder / "test_images.npy", hostile, allow_pickle=True)
    describe_anew(folder)
    with pytest.raises(UserError, match=r"test_images\.npy is not the file .*Python objects in dtype"):
        prepared.open_prepared(folder)
    assert not (tmp_path / "ran").exists()
