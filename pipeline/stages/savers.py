"""Memory savers by their names in params.yaml: which a training could use, and how they are put in place.

| saver | what it does | what it costs |
| --- | --- | --- |
| uncached_casts | each weight is cast for each micro-batch, instead of once a window | the casts |
| checkpointing_half | every second block is computed again in the backward | an eighth of a step, about |
| checkpointing | every block is | a quarter, about |
| offload | what autograd saves waits in the host's memory | its way there and back |
| optimizer_on_host | so does the optimizer's state, but for the update | once a window |
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipeline import models
from pipeline.config import Params
from pipeline.engine import keep_state_on_host, offloaded, recompute, repeated_blocks
from pipeline.memory.planner import (
    CHECKPOINTING,
    CHECKPOINTING_HALF,
    OFFLOAD,
    OPTIMIZER_ON_HOST,
    UNCACHED_CASTS,
)
from pipeline.memory.prediction import Savers
from pipeline.memory.trace import without_memory

EVERY = {CHECKPOINTING: 1, CHECKPOINTING_HALF: 2}


def combinations(params: Params, description: dict[str, Any], *, cuda: bool) -> list[Savers]:
    """What the plan may choose from, the most saving last: those of the file, or all that could help."""
    if params.memory.savers != "auto":
        return [tuple(params.memory.savers)]
    within: list[Savers] = [()]
    if params.precision != "fp32":
        within.append((UNCACHED_CASTS,))
    if not params.execution.compile and blocks_of(params, _empty_model(params, description)):
        within += [(CHECKPOINTING_HALF,), (CHECKPOINTING,)]
    host = [OPTIMIZER_ON_HOST] if cuda and _has_state(params) else []
    host += [OFFLOAD] if cuda and not params.execution.compile else []
    to_host = [some for count in range(len(host) + 1) for some in itertools.combinations(host, count)]
    return [one + other for one in within for other in to_host]


def caches_casts(savers: list[str]) -> bool:
    """Not with checkpointing: what is recomputed in autograd's own thread clears the cache of all."""
    return not {UNCACHED_CASTS, *EVERY} & set(savers)


def save_activations(params: Params, model: nn.Module) -> None:
    """Puts checkpointing in place. Raises ValueError where there is nothing to recompute."""
    for saver in set(params.memory.chosen) & set(EVERY):
        blocks = blocks_of(params, model)
        if not blocks:
            raise ValueError(
                f"memory.savers {saver}: no repeated blocks are found in model {params.model.name}; name "
                "modules in memory.blocks"
            )
        recompute(model, blocks, every=EVERY[saver])


def save_state(params: Params, optimizer: torch.optim.Optimizer) -> None:
    if OPTIMIZER_ON_HOST in params.memory.chosen:
        keep_state_on_host(optimizer)


def saving(params: Params, forward: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """The forward, with what it saves for its backward in the host's memory where that is asked."""
    return offloaded(forward, model) if OFFLOAD in params.memory.chosen else forward


def blocks_of(params: Params, model: nn.Module) -> list[str]:
    return repeated_blocks(model) if params.memory.blocks == "auto" else params.memory.blocks


def _has_state(params: Params) -> bool:
    """That could be kept on the host: quantised moments cannot."""
    momentum = params.optimizer.name != "sgd" or params.optimizer.momentum > 0
    return momentum and params.optimizer.state_bits == 32


def _empty_model(params: Params, description: dict[str, Any]) -> nn.Module:
    section, classes = params.model, len(description["classes"])
    return without_memory(
        lambda: models.build(section.name, section.args, classes, description["shape"][0]), device="meta"
    )
