"""Windows of a split: each epoch a seeded permutation, cut into effective batches, the last one shorter.

The permutation is a function of (seed, epoch), so an epoch can be entered again, and the number of loader
processes changes nothing. Images stay uint8 until they are on the device.
"""

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pipeline.data.prepared import Split

Window = dict[str, torch.Tensor]  # images (n, C, H, W) uint8, labels (n,) int64, ids (n,) int64


class _Windows(Dataset[Window]):
    """Gives the window of an array of sample ids."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __getitem__(self, ids: Any) -> Window:
        return {
            "images": torch.from_numpy(np.array(self.split.images[ids])),
            "labels": torch.from_numpy(self.split.labels[ids]),
            "ids": torch.from_numpy(ids),
        }


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ctrl-C and a service manager's SIGTERM reach the whole group; the training still finishes its window.

    Workers end when the parent tells them to, or is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class WindowLoader:
    """The windows of a split, `effective_batch_size` samples each, drawn without replacement.

    workers: processes that gather ahead; 0 gathers in this one, which is the faster way from arrays.
    """

    def __init__(self, split: Split, effective_batch_size: int, *, seed: int, workers: int = 0) -> None:
        self.split = split
        self.effective_batch_size = effective_batch_size
        self.seed = seed
        self.workers = workers

    def __len__(self) -> int:
        """Windows in an epoch."""
        return -(-len(self.split) // self.effective_batch_size)

    def epoch(self, epoch: int, seen: int = 0) -> Iterator[Window]:
        """The windows of that epoch (from 0): every sample exactly once, but for the first `seen` ones."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.split))
        return iter(self._loader(order[seen:]))

    def in_order(self) -> Iterator[Window]:
        """Every sample once, in the order of the split: for evaluation."""
        return iter(self._loader(np.arange(len(self.split))))

    def _loader(self, order: np.ndarray) -> DataLoader[Window]:
        size = self.effective_batch_size
        windows = [order[start : start + size] for start in range(0, len(order), size)]
        return DataLoader(
            _Windows(self.split),
            sampler=windows,
            batch_size=None,
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # else each epoch would draw from the model's random numbers
            worker_init_fn=_leave_signals_to_the_parent,
        )
