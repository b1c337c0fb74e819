"""The engine: one exact optimizer step of mixed precision and gradient accumulation.

It imports torch and itself, nothing else, and serves in anybody's own script:

    precision = Precision("amp_fp16", device="cuda")
    trainer = Trainer(model, optimizer, CrossEntropy(), precision=precision, micro_batch_size=8)
    for window in loader:                 # windows of 256: (inputs, targets)
        result = trainer.step(window)     # StepResult(applied=True, loss=…, grad_norm=…, loss_scale=…)
"""

from pipeline.engine.averaging import WeightAverage
from pipeline.engine.checkpoint import Checkpoints, DamagedError
from pipeline.engine.dependence import depends_on_split
from pipeline.engine.determinism import nondeterministic
from pipeline.engine.diagnosis import Diagnosis
from pipeline.engine.host_state import keep_state_on_host
from pipeline.engine.loop import fit
from pipeline.engine.losses import CrossEntropy, MeanSquaredError
from pipeline.engine.offload import offloaded
from pipeline.engine.optimizer import (
    allocate_state,
    build_optimizer,
    freeze,
    parameter_groups,
    state_tensors,
)
from pipeline.engine.precision import Precision, ScalerSettings
from pipeline.engine.random_state import random_state_kept
from pipeline.engine.recompute import recompute, repeated_blocks
from pipeline.engine.recovery import DoesNotFitError, Recovery
from pipeline.engine.schedule import Schedule
from pipeline.engine.snapshot import NonFiniteError, restore, snapshot
from pipeline.engine.state import TrainState
from pipeline.engine.step import CollapseError, StepResult, Trainer
from pipeline.engine.window import accumulation_steps

__all__ = [
    "Checkpoints",
    "CollapseError",
    "CrossEntropy",
    "DamagedError",
    "Diagnosis",
    "DoesNotFitError",
    "MeanSquaredError",
    "NonFiniteError",
    "Precision",
    "Recovery",
    "ScalerSettings",
    "Schedule",
    "StepResult",
    "TrainState",
    "Trainer",
    "WeightAverage",
    "accumulation_steps",
    "allocate_state",
    "build_optimizer",
    "depends_on_split",
    "fit",
    "freeze",
    "keep_state_on_host",
    "nondeterministic",
    "offloaded",
    "parameter_groups",
    "random_state_kept",
    "recompute",
    "repeated_blocks",
    "restore",
    "snapshot",
    "state_tensors",
]
