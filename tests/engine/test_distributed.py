"""Two processes under DDP share a window (gloo, on the CPU); the oracle is the whole window in one."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nets import copies, distance, net, trainer, window
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pipeline.engine import CrossEntropy

PARTS = (slice(0, 7), slice(7, 12))  # 7 samples on one rank, 5 on the other: 3 and 2 micro-batches of 3


def masked(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Counts the targets that are not 0: items that are not samples, and unlike on the ranks."""
    mask = targets != 0
    losses = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
    return (losses * mask).sum(), mask.sum()


def train(rank: int, port: int, folder: Path, loss_name: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DistributedDataParallel(net(dtype=torch.float64))
    synchronised = 0

    def counting(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal synchronised
        synchronised += 1
        return default_hooks.allreduce_hook(None, bucket)

    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model.register_comm_hook(None, counting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loss = masked if loss_name == "masked" else CrossEntropy()
    stepper = trainer(model, optimizer, micro=3, loss=loss, max_grad_norm=0.5)
    results = []
    for seed in range(3):
        images, labels = window(12, seed, dtype=torch.float64)
        if seed == 1 and rank == 1:
            images = images * torch.nan  # one rank's fault is a skip on both
        results.append(stepper.step((images[PARTS[rank]], labels[PARTS[rank]])))
    torch.save((copies(model.parameters()), results, synchronised), folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("loss_name", ["samples", "masked"])
def test_two_ranks_give_the_whole_windows_step_and_synchronise_once_a_window(
    tmp_path: Path, loss_name: str
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.spawn(train, (port, tmp_path, loss_name), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    model = net(dtype=torch.float64)
    loss = masked if loss_name == "masked" else CrossEntropy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    whole = trainer(model, optimizer, micro=12, loss=loss, max_grad_norm=0.5)
    expected = [whole.step(window(12, seed, dtype=torch.float64)) for seed in (0, 2)]
    for weights, results, synchronised in ranks:
        assert distance(weights, copies(model.parameters())) <= 1e-12
        assert [result.applied for result in results] == [True, False, True]
        assert synchronised == 3
        for ours, oracle in zip([results[0], results[2]], expected, strict=True):
            assert ours.samples == 12
            assert ours.loss == pytest.approx(oracle.loss, rel=1e-12)
            assert ours.grad_norm == pytest.approx(oracle.grad_norm, rel=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(ranks[0][0], ranks[1][0], strict=True))
