"""What a training is made of, from params.yaml: model, loss, optimizer and the step that joins them."""

import importlib
import random
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeline import models
from pipeline.config import Params
from pipeline.data import prepared
from pipeline.engine import (
    CrossEntropy,
    Precision,
    ScalerSettings,
    Schedule,
    Trainer,
    WeightAverage,
    allocate_state,
    build_optimizer,
    depends_on_split,
    freeze,
    nondeterministic,
    parameter_groups,
)
from pipeline.errors import UserError
from pipeline.memory.trace import without_memory
from pipeline.stages.quantised import quantised_adamw
from pipeline.stages.savers import caches_casts, save_activations, save_state, saving


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def image_set(data: prepared.Prepared) -> models.ImageSet:
    description = data.description
    return models.ImageSet(
        data.classes, data.channels, data.image_size, description["mean"], description["std"]
    )


def build_model(params: Params, images: models.ImageSet) -> tuple[nn.Module, models.Transform, list[str]]:
    """The model with what it starts from, its transform, and the names of the weights that are fresh."""
    section, classes = params.model, len(images.classes)
    if (kind := models.kind(section.name)) != "classification":
        raise UserError(
            f"model.name {section.name} is a {kind} model: it can be planned (python -m pipeline plan), and "
            "not trained here"
        )
    model = models.build(section.name, section.args, classes, images.channels)
    transform = models.prepare_transform(model, section.name, section.weights, images)
    models.check_forward(model, section.name, transform, classes)
    return model, transform, models.load_weights(model, section.name, section.weights, classes)


def without_deterministic_kernel(params: Params, images: models.ImageSet) -> list[str]:
    """The model's operations that have no deterministic kernel on CUDA; none where it needs real values."""
    section, classes = params.model, len(images.classes)
    model = without_memory(
        lambda: models.build(section.name, section.args, classes, images.channels), device="meta"
    )
    transform = models.prepare_transform(model, section.name, section.weights, images)
    blank = torch.empty(2, transform.channels, transform.size, transform.size, device="meta")
    try:
        return nondeterministic(lambda: model(blank).sum().backward())
    except (RuntimeError, NotImplementedError):
        return []  # its first window on CUDA will tell


def build_loss(params: Params, data: prepared.Prepared) -> Callable[..., Any]:
    section = params.loss
    if section.name == "cross_entropy":
        return CrossEntropy(section.label_smoothing, class_weights(section.class_weights, data))
    if section.label_smoothing or section.class_weights != "none":
        raise UserError(
            "loss.label_smoothing and loss.class_weights belong to cross_entropy: a loss of your own sets "
            "its own"
        )
    module, _, name = params.loss.name.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"loss.name {params.loss.name} cannot be imported: {error}") from None


def note_on_split(model: nn.Module) -> None:
    """Says once what of this model depends on batch.micro_batch_size."""
    if kinds := depends_on_split(model):
        print(
            f"model: has {', '.join(kinds)}, drawn per micro-batch: its result depends on "
            "batch.micro_batch_size (all else in a step does not)"
        )


def class_weights(chosen: str | list[float], data: prepared.Prepared) -> list[float] | None:
    """One number a class; balanced: training samples / (classes x samples of the class), 1 on average."""
    if chosen == "none":
        return None
    if chosen == "balanced":
        counts = data.description["counts_by_class"]["train"]
        return [sum(counts) / (len(counts) * max(1, count)) for count in counts]
    if len(chosen) != len(data.classes):
        raise UserError(
            f"loss.class_weights: {len(chosen)} numbers for {len(data.classes)} classes; give one a class: "
            f"{' '.join(data.classes[:10])}"
        )
    return [float(weight) for weight in chosen]


def build_trainer(
    params: Params,
    model: nn.Module,
    forward: Callable[..., Any],
    loss: Callable[..., Any],
    *,
    total_steps: int,
) -> Trainer:
    """The step that params.yaml describes, with a forward and a loss as engine.Trainer takes them."""
    chosen, scaler, device = params.optimizer, params.scaler, next(model.parameters()).device
    settings = ScalerSettings(
        scaler.init_scale,
        scaler.growth_factor,
        scaler.backoff_factor,
        scaler.growth_interval,
        scaler.min_scale,
    )
    try:
        freeze(model, params.model.freeze)
        save_activations(params, model)
        optimizer = build_state(params, model)
        save_state(params, optimizer)
        trainer = Trainer(
            model,
            optimizer,
            loss,
            precision=Precision(
                params.precision,
                device,
                settings if params.precision == "amp_fp16" else None,
                cache_casts=caches_casts(params.memory.chosen),
            ),
            micro_batch_size=params.batch.planned,
            max_grad_norm=chosen.max_grad_norm,
            schedule=Schedule(params.schedule.name, total_steps, params.schedule.warmup_fraction),
            average=WeightAverage(model, params.train.ema_decay),
            forward=saving(params, forward, model),
            batchnorm_per_window=params.train.batchnorm_per_window,
            max_consecutive_skips=scaler.max_consecutive_skips,
            sample_ids=lambda window: window["ids"],
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    allocate_state(optimizer, starts_at_zero=chosen.state_bits != 32)
    return trainer


def build_state(params: Params, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, with the bits of state that are asked for."""
    chosen = params.optimizer
    if chosen.state_bits == 32:
        return build_optimizer(
            model, chosen.name, lr=chosen.lr, weight_decay=chosen.weight_decay, momentum=chosen.momentum
        )
    return quantised_adamw(parameter_groups(model, chosen.weight_decay), lr=chosen.lr, bits=chosen.state_bits)


def build_forward(
    params: Params, model: nn.Module, transform: models.Transform
) -> Callable[[nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]:
    """The forward of a micro-batch: transform, model; compiled and in channels_last where that is asked."""
    network: Callable[..., Any] = model
    if params.execution.compile:
        if not any(map(shutil.which, ("g++", "c++", "clang++"))):
            raise UserError("execution.compile: torch.compile needs a C++ compiler, and none is on PATH")
        network = torch.compile(model)
    layout = torch.contiguous_format
    if params.execution.channels_last:
        layout = torch.channels_last
        model.to(memory_format=layout)

    def forward(model: nn.Module, window: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        images = transform(window["images"]).contiguous(memory_format=layout)
        return network(images), window["labels"]

    return forward
