"""Loops that train the same model on the same micro-batches: the textbook's, ours, and those of libraries.

Each is a function `contender(job)` that trains `job.windows` windows of ACCUMULATION micro-batches, taking
them from its clock, which hands the turn to the next contender after each window: all are timed from the
outside, by the same means and side by side. Without its package a contender raises ImportError; with a
precision that it lacks on this device, whatever it likes.
"""

import logging
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workloads import Workload

from pipeline.engine import CrossEntropy, Precision, ScalerSettings, Trainer, allocate_state, build_optimizer

ACCUMULATION = 4
MAX_NORM = 1.0
RATE = 1e-4
DTYPES = {"fp32": torch.float32, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
LIGHTNING = {"fp32": "32-true", "amp_bf16": "bf16-mixed", "amp_fp16": "16-mixed"}
PLAIN = {"fp32": "no", "amp_bf16": "bf16", "amp_fp16": "fp16"}


class Turns:
    """One contender at a time runs, each for a few windows: so all meet the machine in the same state."""

    def __init__(self, names: list[str], windows: int = 1) -> None:
        self.windows = windows
        self._order = deque(names)
        self._changed = threading.Condition()

    def take(self, name: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._order[0] == name)

    def give(self) -> None:
        with self._changed:
            self._order.rotate(-1)
            self._changed.notify_all()

    def leave(self, name: str) -> None:
        with self._changed:
            if name in self._order:
                self._order.remove(name)
            self._changed.notify_all()


@dataclass
class Clock:
    """Gives the same batch `count` times, `per_turn` of them a turn; times each turn from the outside.

    wall, cpu: seconds of each turn, by the wall clock and of this thread's CPU time.
    """

    batch: Any
    count: int
    per_turn: int
    turns: Turns
    name: str
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    batch_size: int | None = None  # looked for by transformers

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.count):
            if index % self.per_turn == 0:
                if index:
                    self._end()
                self._begin()
            yield self.batch
        self._end()

    def _begin(self) -> None:
        self.turns.take(self.name)
        self._started = time.perf_counter(), time.thread_time()

    def _end(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.wall.append(time.perf_counter() - self._started[0])
        self.cpu.append(time.thread_time() - self._started[1])
        self.turns.give()


@dataclass
class Job:
    """What a contender does.

    equal: everybody takes the fused optimizer, instead of its default. accumulation: micro-batches a window.
    finds_batch_size: of transformers alone, which then begins at the workload's and may train on less.
    """

    name: str
    workload: Workload
    precision: str
    windows: int
    equal: bool
    device: str
    turns: Turns
    accumulation: int = ACCUMULATION
    finds_batch_size: bool = False
    clock: Clock = field(init=False)

    def data(self, *, whole_windows: bool = False) -> Clock:
        """Micro-batches, or windows of them."""
        inputs, targets = (part.to(self.device) for part in self.workload.micro_batch())
        if whole_windows:
            inputs = torch.cat([inputs] * self.accumulation)
            targets = torch.cat([targets] * self.accumulation)
            each = 1
        else:
            each = self.accumulation
        per_turn = self.turns.windows * each
        self.clock = Clock((inputs, targets), self.windows * each, per_turn, self.turns, self.name)
        return self.clock

    def model(self) -> nn.Module:
        return self.workload.model().to(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True if self.equal else None)


def textbook(job: Job) -> None:
    """As it is commonly taught."""
    model, dtype = job.model(), DTYPES[job.precision]
    optimizer = job.optimizer(model)
    scaler = torch.amp.GradScaler(job.device, enabled=job.precision == "amp_fp16")
    for index, (inputs, targets) in enumerate(job.data(), start=1):
        with torch.autocast(job.device, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(model(inputs), targets) / job.accumulation
        scaler.scale(loss).backward()
        if index % job.accumulation == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)


def tightfit(job: Job) -> None:
    model = job.model()
    optimizer = build_optimizer(model, "adamw", lr=RATE, weight_decay=0.01)
    allocate_state(optimizer)
    trainer = Trainer(
        model,
        optimizer,
        CrossEntropy(),
        precision=Precision(
            job.precision, job.device, ScalerSettings() if job.precision == "amp_fp16" else None
        ),
        micro_batch_size=job.workload.shape[0],
        max_grad_norm=MAX_NORM,
    )
    for window in job.data(whole_windows=True):
        trainer.step(window)


def fabric(job: Job) -> None:
    import lightning

    fabric = lightning.Fabric(accelerator=job.device, devices=1, precision=LIGHTNING[job.precision])
    model = job.model()
    model, optimizer = fabric.setup(model, job.optimizer(model))
    for index, (inputs, targets) in enumerate(job.data(), start=1):
        accumulating = index % job.accumulation != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            fabric.backward(F.cross_entropy(model(inputs), targets) / job.accumulation)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()


def lightning_trainer(job: Job) -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = job.model()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer(self.network)

    pl.Trainer(
        accelerator=job.device,
        devices=1,
        precision=LIGHTNING[job.precision],
        accumulate_grad_batches=job.accumulation,
        gradient_clip_val=MAX_NORM,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    ).fit(Module(), job.data())


def accelerate(job: Job) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # else its first precision is kept for all
    accelerator = Accelerator(
        cpu=job.device == "cpu",
        mixed_precision=PLAIN[job.precision],
        gradient_accumulation_steps=job.accumulation,
    )
    model = job.model()
    model, optimizer = accelerator.prepare(model, job.optimizer(model))
    for inputs, targets in job.data():
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(inputs), targets))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.free_memory()


def hugging_face(job: Job) -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = job.model()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.network(inputs)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    model, data = WithLoss(), job.data()
    inputs, targets = data.batch

    class FromClock(transformers.Trainer):
        def get_train_dataloader(self) -> Clock:
            size = self._train_batch_size
            data.batch = {"inputs": inputs[:size], "labels": targets[:size]}
            return data

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=job.workload.shape[0],
            auto_find_batch_size=job.finds_batch_size,
            use_cpu=job.device == "cpu",
            bf16=job.precision == "amp_bf16",
            fp16=job.precision == "amp_fp16",
            gradient_accumulation_steps=job.accumulation,
            max_grad_norm=MAX_NORM,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            num_train_epochs=1,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        optimizer = job.optimizer(model) if job.equal else None  # its own default is a fused AdamW
        FromClock(
            model, arguments, train_dataset=list(range(len(data))), optimizers=(optimizer, None)
        ).train()


def ignite(job: Job) -> None:
    """Its engine around a step of one's own, as its guide to gradient accumulation has it."""
    from ignite.engine import Engine

    model, dtype = job.model(), DTYPES[job.precision]
    optimizer = job.optimizer(model)
    scaler = torch.amp.GradScaler(job.device, enabled=job.precision == "amp_fp16")

    def step(engine: Any, batch: tuple[Tensor, Tensor]) -> float:
        with torch.autocast(job.device, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(model(batch[0]), batch[1]) / job.accumulation
        scaler.scale(loss).backward()
        if engine.state.iteration % job.accumulation == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    data = job.data()
    Engine(step).run(data, max_epochs=1, epoch_length=len(data))


CONTENDERS = {
    "textbook loop": textbook,
    "tightfit": tightfit,
    "Lightning Fabric": fabric,
    "Lightning Trainer": lightning_trainer,
    "accelerate": accelerate,
    "Hugging Face Trainer": hugging_face,
    "ignite": ignite,
}


def quiet() -> None:
    """The libraries greet and warn; a benchmark prints a table."""
    warnings.filterwarnings("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "accelerate", "ignite"):
        logging.getLogger(name).setLevel(logging.ERROR)
