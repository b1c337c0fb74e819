import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.loader import WindowLoader
from pipeline.data.prepared import Split


def split(samples: int) -> Split:
    images = np.arange(samples, dtype=np.uint8).reshape(-1, 1, 1, 1) * np.ones((1, 1, 2, 2), np.uint8)
    return Split(images, np.arange(samples) * 10)


@settings(deadline=None, max_examples=30)
@given(samples=st.integers(1, 60), size=st.integers(1, 70), epoch=st.integers(0, 3))
def test_law_2_an_epoch_holds_every_sample_exactly_once(samples: int, size: int, epoch: int) -> None:
    loader = WindowLoader(split(samples), size, seed=1)
    windows = list(loader.epoch(epoch))
    assert sorted(torch.cat([window["ids"] for window in windows]).tolist()) == list(range(samples))
    assert len(windows) == len(loader)
    assert [len(window["ids"]) for window in windows[:-1]] == [size] * (len(windows) - 1)
    for window in windows:
        assert torch.equal(window["labels"], window["ids"] * 10)
        assert torch.equal(window["images"][:, 0, 0, 0].long(), window["ids"])
        assert window["images"].dtype == torch.uint8


def ids(loader: WindowLoader, epoch: int) -> list[list[int]]:
    return [window["ids"].tolist() for window in loader.epoch(epoch)]


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_law_12_the_windows_do_not_depend_on_the_number_of_workers() -> None:
    alone, helped = (WindowLoader(split(41), 8, seed=5, workers=workers) for workers in (0, 2))
    assert ids(alone, 1) == ids(helped, 1)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    assert ids(WindowLoader(split(41), 8, seed=5), 1) == ids(WindowLoader(split(41), 8, seed=5), 1)
    assert ids(WindowLoader(split(41), 8, seed=5), 1) != ids(WindowLoader(split(41), 8, seed=5), 2)
    assert ids(WindowLoader(split(41), 8, seed=5), 1) != ids(WindowLoader(split(41), 8, seed=6), 1)


def test_loading_takes_none_of_the_models_random_numbers() -> None:
    before = torch.get_rng_state()
    ids(WindowLoader(split(9), 4, seed=0), 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_goes_in_order() -> None:
    windows = WindowLoader(split(7), 3, seed=0).in_order()
    assert [window["ids"].tolist() for window in windows] == [[0, 1, 2], [3, 4, 5], [6]]
