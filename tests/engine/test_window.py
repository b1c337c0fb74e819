import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engine.window import accumulation_steps, micro_batches, samples


@given(total=st.integers(0, 300), size=st.integers(1, 320))
def test_micro_batches_hold_each_sample_once_as_few_and_as_equal_as_possible(total: int, size: int) -> None:
    parts = micro_batches(torch.arange(total), size)
    lengths = [len(part) for part in parts]
    assert torch.cat([*parts, torch.arange(0)]).tolist() == list(range(total))
    assert len(parts) == accumulation_steps(total, size) == -(-total // size)
    assert all(length <= size for length in lengths)
    assert not lengths or max(lengths) - min(lengths) <= 1


def test_a_batch_may_be_nested_and_is_split_along_the_first_axis() -> None:
    batch = {"images": torch.arange(6).reshape(3, 2), "rest": (torch.arange(3), [torch.ones(3, 1, 4)])}
    first, second = micro_batches(batch, 2)
    assert [samples(first), samples(second)] == [1, 2]
    assert second["images"].tolist() == [[2, 3], [4, 5]]
    assert isinstance(second["rest"], tuple)
    assert second["rest"][1][0].shape == (2, 1, 4)


def test_micro_batches_are_views_and_cost_no_copy() -> None:
    batch = torch.arange(10)
    assert micro_batches(batch, 4)[1].untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.ones(3), torch.ones(4)), "agree in their first axis"),
        (torch.tensor(1.0), "agree in their first axis"),
        ((torch.ones(3), "label"), "holds a str"),
        ((), "none"),
    ],
)
def test_what_is_no_window_is_refused(batch: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        micro_batches(batch, 2)


def test_a_micro_batch_of_no_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        micro_batches(torch.ones(3), 0)


def test_the_textbooks_example_is_32_steps() -> None:
    assert accumulation_steps(256, 8) == 32
