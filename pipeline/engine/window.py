"""A window, the samples of one optimizer step, and its split into micro-batches.

A window is any batch: a tensor, or a tuple, list or dict of tensors (nested as you like) that agree in
their first axis, the samples. The split is a matter of execution alone: it is derived here, from the
window that is there, and never from a counter of loop turns. That is why the last, shorter window of an
epoch, a window smaller than a micro-batch, or another micro-batch size from one window to the next need
no special case anywhere.
"""

import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Batch: TypeAlias = Any  # a tensor, or a tuple, list or dict of batches


def tensors(batch: Batch) -> list[torch.Tensor]:
    """All tensors of a batch, in order. Raises ValueError where something else stands in it."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, batch)
    return found


def samples(batch: Batch) -> int:
    """The length of the first axis, on which all tensors of the batch must agree (else ValueError)."""
    lengths = {tensor.shape[0] if tensor.ndim else None for tensor in tensors(batch)}
    if len(lengths) != 1 or None in lengths:
        found = ", ".join(str(tuple(tensor.shape)) for tensor in tensors(batch)) or "none"
        raise ValueError(
            f"a window's tensors must agree in their first axis, the samples; their shapes are: {found}"
        )
    return int(lengths.pop() or 0)


def micro_batches(window: Batch, micro_batch_size: int) -> list[Batch]:
    """Views of the window, of at most `micro_batch_size` samples, as few and as equal as possible.

    65 samples at 16 become five of 13, not four of 16 and a single one, on which BatchNorm would fail.
    An empty window gives no micro-batch. Raises ValueError for a size under 1.
    """
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size={micro_batch_size} must be at least 1")
    total = samples(window)
    count = accumulation_steps(total, micro_batch_size)
    edges = [total * index // count for index in range(count + 1)] if count else []
    return _split(window, [end - start for start, end in itertools.pairwise(edges)])


def accumulation_steps(samples_in_window: int, micro_batch_size: int) -> int:
    """Micro-batches in a window of that many samples: the ceiling of their quotient."""
    return -(-samples_in_window // micro_batch_size)


def _split(batch: Batch, sizes: list[int]) -> list[Batch]:
    if isinstance(batch, torch.Tensor):
        return list(batch.split(sizes)) if sizes else []
    if isinstance(batch, dict):
        rows = zip(*(_split(value, sizes) for value in batch.values()), strict=True)
        return [dict(zip(batch, row, strict=True)) for row in rows]
    rows = zip(*(_split(value, sizes) for value in batch), strict=True)
    if hasattr(batch, "_fields"):
        return [type(batch)(*row) for row in rows]
    return [type(batch)(row) for row in rows]


def map_tensors(function: Callable[..., Any], batch: Batch) -> Batch:
    """The batch with `function` applied to each of its tensors."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {name: map_tensors(function, value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(function, value) for value in batch)
    raise ValueError(
        f"a window is a tensor, or a tuple, list or dict of tensors; it holds a {type(batch).__name__}"
    )
