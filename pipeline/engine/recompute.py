"""Activation checkpointing by block: the backward computes activations again instead of keeping them.

What a forward leaves for its backward is most of training's memory, and nearly all of it lies inside a
model's repeated blocks. A recomputed block keeps its inputs alone; when the backward reaches it, its
forward runs once more (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016). That costs up
to one more forward and changes no bit of the result: random state and autocast are as they were the first
time, so dropout draws the same masks, and the block finds its buffers as it found them then, so running
statistics move once.

The blocks' `forward` is replaced on the instances. Modules, their names and their hooks stay where they
are, and with them the keys of `state_dict`.
"""

import difflib
import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from pipeline.engine.batchnorm import is_diverted

BARE_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # themselves, not their subclasses
WEIGHTS_OF_A_BLOCK = 2  # matrices or filters; with one it is a layer and its norm: it would save little


def repeated_blocks(model: nn.Module) -> list[str]:
    """The dotted names of the model's repeated blocks, in the order of its modules; [] where it has none.

    Found by structure: a block is of a class that occurs at least twice in the model, has children, and at
    least once holds two weights or more. Of nested ones the outermost counts, unless its class does nothing
    but hold several blocks of another one (a stage): then those do. In torchvision: Bottleneck, EncoderBlock,
    SwinTransformerBlock, CNBlock, MBConv, _DenseLayer, MaxVitLayer and their like. VGG and AlexNet are plain
    layers and have none; name modules of theirs to `recompute` instead.
    """
    return [name for name, _ in _outermost(model, _block_classes(model))]


def recompute(model: nn.Module, blocks: Iterable[str], every: int = 1) -> Callable[[], None]:
    """Makes `model` recompute the blocks in its backward; returns what undoes it.

    blocks: dotted names of modules, or patterns of the shell (fnmatch: "layer?.*"). Of a module and another
    one inside it the outer is taken. every: 2 takes every second one, beginning with the first. Only a model
    in training mode recomputes, and only where gradients are wanted. Raises ValueError for a pattern that
    matches no module, for a BatchNorm layer by itself, and for a block that is recomputed already.
    """
    if every < 1:
        raise ValueError(f"every={every} must be at least 1; 1 recomputes all blocks, 2 every second one")
    modules = dict(model.named_modules())
    chosen = _outer(_matching(modules, blocks))[::every]
    for name in chosen:
        _check(name, modules[name])
    patched = [_Block(modules[name], model) for name in chosen]
    for block in patched:
        block.patch()

    def undo() -> None:
        for block in patched:
            block.unpatch()

    return undo


def _block_classes(model: nn.Module) -> set[type]:
    composed = [
        module
        for module in model.modules()
        if module is not model
        and type(module) not in BARE_CONTAINERS
        and any(True for _ in module.children())
    ]
    weights: dict[type, int] = {}
    for module in composed:
        weights[type(module)] = max(weights.get(type(module), 0), _weights(module))
    counts = Counter(type(module) for module in composed)
    classes = {kind for kind in counts if counts[kind] >= 2 and weights[kind] >= WEIGHTS_OF_A_BLOCK}
    instances = {kind: [module for module in composed if type(module) is kind] for kind in classes}
    return {kind for kind in classes if not _is_stage(instances[kind], classes)}


def _is_stage(instances: list[nn.Module], classes: set[type]) -> bool:
    """Whether modules of one class hold their weights in blocks of one other class, and some in several."""
    inner = [_outermost(module, classes) for module in instances]
    of_one = all(len({type(block) for _, block in blocks}) == 1 for blocks in inner)
    complete = all(
        sum(_weights(block) for _, block in blocks) == _weights(module)
        for module, blocks in zip(instances, inner, strict=True)
    )
    return of_one and complete and any(len(blocks) > 1 for blocks in inner)


def _outermost(module: nn.Module, classes: set[type], prefix: str = "") -> list[tuple[str, nn.Module]]:
    found = []
    for name, child in module.named_children():
        if type(child) in classes:
            found.append((prefix + name, child))
        else:
            found += _outermost(child, classes, f"{prefix}{name}.")
    return found


def _weights(module: nn.Module) -> int:
    return sum(parameter.ndim >= 2 for parameter in module.parameters())


def _matching(modules: dict[str, nn.Module], patterns: Iterable[str]) -> list[str]:
    names = [name for name in modules if name]
    found: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.4) or names[:5]
            raise ValueError(f"recompute: {pattern!r} matches no module; near it are {', '.join(near)}")
        found.update(matching)
    return [name for name in names if name in found]


def _outer(names: list[str]) -> list[str]:
    """Without those that lie inside another one: they are recomputed with it."""
    chosen = set(names)
    return [name for name in names if not any(name[:dot] in chosen for dot in _dots(name))]


def _dots(name: str) -> list[int]:
    return [index for index, letter in enumerate(name) if letter == "."]


def _check(name: str, module: nn.Module) -> None:
    if isinstance(module, _BatchNorm):  # engine.batchnorm puts a forward of its own there in each window
        raise ValueError(f"recompute: {name} is a BatchNorm layer; name the module around it instead")
    if isinstance(getattr(vars(module).get("forward"), "__self__", None), _Block):
        raise ValueError(f"recompute: {name} is recomputed already; undo that first")


class _Block:
    """One block and its forwards. Bound methods, so that a deep copy of the model has its own."""

    def __init__(self, block: nn.Module, model: nn.Module) -> None:
        self.block, self.model = block, model
        self.own_attribute = "forward" in vars(block)
        self.plain = block.forward

    def patch(self) -> None:
        self.block.forward = self.forward

    def unpatch(self) -> None:
        del self.block.forward
        if self.own_attribute:
            self.block.forward = self.plain

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if not (self.model.training and torch.is_grad_enabled()):
            return self.plain(*inputs, **options)
        # flat: only of tensors that are arguments themselves does checkpoint save what autograd's hooks see
        leaves, structure = tree_flatten((inputs, options))

        def run(*leaves: Any) -> Any:
            inputs, options = tree_unflatten(leaves, structure)
            return self.plain(*inputs, **options)

        contexts = _Buffers(self.block).contexts
        return checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=True, context_fn=contexts)


@dataclass
class _Found:
    """A buffer as a forward found it."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    value: Tensor

    def moved(self) -> bool:
        """Whether the forward changed it. Of running statistics torch keeps no version."""
        present = self.module._buffers.get(self.name)
        changed = present is not self.buffer or self.buffer._version != self.version
        return changed or isinstance(self.module, _NormBase)


class _Buffers:
    """What a block's forward moves, for the recomputation to begin from the same and move nothing again.

    The recomputation gets copies in place of the buffers. Inside a window the engine's BatchNorm layers move
    nothing and are left out (see engine.batchnorm).
    """

    def __init__(self, block: nn.Module) -> None:
        self.found = [
            _Found(module, name, buffer, buffer._version, buffer.detach().clone())
            for module in block.modules()
            if not is_diverted(module)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return self._forward(), self._recomputation()

    @contextmanager
    def _forward(self) -> Iterator[None]:
        yield
        self.found = [found for found in self.found if found.moved()]  # constants need no copy

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        present = [(found, found.module._buffers.get(found.name)) for found in self.found]
        for found in self.found:
            found.module._buffers[found.name] = found.value.clone()
        try:
            yield
        finally:
            for found, buffer in present:
                found.module._buffers[found.name] = buffer
