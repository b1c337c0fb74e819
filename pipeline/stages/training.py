"""One training: its parts, what a checkpoint of it holds, and the way from the first window to the last."""

from collections.abc import Iterator
from typing import Any

import torch

from pipeline import metrics
from pipeline.config import Params, flatten
from pipeline.data import prepared
from pipeline.data.loader import Window, WindowLoader
from pipeline.engine import StepResult, fit, random_state_kept, restore, snapshot
from pipeline.errors import UserError
from pipeline.memory.planner import Plan
from pipeline.resume.fingerprint import Inputs
from pipeline.resume.found import Found
from pipeline.resume.keeper import Keeper
from pipeline.resume.stop import Stop
from pipeline.stages.account import Account
from pipeline.stages.best import Best
from pipeline.stages.progress import TrainingProgress
from pipeline.stages.record import Record
from pipeline.stages.setup import (
    build_forward,
    build_loss,
    build_model,
    build_trainer,
    image_set,
    note_on_split,
    seed_everything,
)
from pipeline.tracking import Run


class Training:
    """params: with what the plan decided; plan: None where there is none."""

    def __init__(
        self, params: Params, data: prepared.Prepared, device: torch.device, plan: Plan | None
    ) -> None:
        seed_everything(params.seed)
        self.params = params
        self.data = data
        self.images = image_set(data)
        model, self.transform, self.fresh = build_model(params, self.images)
        note_on_split(model)
        model.to(device)
        self.loader = window_loader(params, data)
        self.total_steps = len(self.loader) * params.train.epochs
        self.trainer = build_trainer(
            params,
            model,
            build_forward(params, model, self.transform),
            build_loss(params, data),
            total_steps=self.total_steps,
        )
        self.account = Account(plan, params.memory.chosen, self.trainer, count=not params.execution.compile)
        self.best = Best(params.train.save)

    def record(self, run: Run) -> Record:
        return Record(
            run,
            self.trainer,
            self.account,
            every=self.params.tracking.log_every_steps,
            epoch_samples=len(self.data.splits["train"]),
            effective_batch_size=self.params.batch.effective_batch_size,
        )

    def content(self, asked: Params, inputs: Inputs, record: Record, run: Run) -> dict[str, Any]:
        """Of a checkpoint, as things stand between two windows; raises NonFiniteError."""
        state = snapshot(self.trainer)
        run.journal.sync()  # else a power loss could leave a checkpoint without the rows before it
        return {
            "trainer": state,
            "best": self.best.state_dict(),
            "record": record.state_dict(),
            "inputs": inputs,
            "how": flatten(asked, "how"),
            "environment": environment(self.trainer.precision.device),
            "plan": {
                "micro_batch_size": self.trainer.micro_batch_size,
                "savers": self.params.memory.chosen,
            },
            "journal": {"folder": run.journal.folder.name, "position": run.journal.position},
            "run_id": run.id,
        }

    def go_on_from(self, found: Found, record: Record) -> None:
        """Puts everything where the checkpoint has it; raises UserError where it does not fit."""
        groups = self.trainer.optimizer.param_groups
        settings = [
            {name: value for name, value in group.items() if name != "params"} | {"initial_lr": group["lr"]}
            for group in groups
        ]
        try:
            restore(self.trainer, found.content["trainer"])
        except (ValueError, RuntimeError, KeyError) as error:
            raise UserError(f"{found.path} cannot be continued from: {error}") from None
        for group, own in zip(self.trainer.optimizer.param_groups, settings, strict=True):
            group.update(own)  # of params.yaml, where a checkpoint of other settings is taken on purpose
        self.trainer.micro_batch_size = self.params.batch.planned
        self.best.load_state_dict(found.content["best"])
        record.load_state_dict(found.content["record"])
        found.drop_tensors()

    def fit(self, record: Record, keeper: Keeper, stop: Stop) -> None:
        """To the last window; raises Stopped, between two windows, when a signal has come."""
        state, epochs = self.trainer.state, self.params.train.epochs
        progress = TrainingProgress(epochs, self.total_steps, completed=state.step, epoch=state.epoch)

        def after_step(result: StepResult) -> None:
            record.after_step(result)
            progress.after_step(result, state.skipped_steps)
            stop.check()
            keeper.after_step(result.step)

        def after_epoch(epoch: int) -> None:
            scores = self.validate(stop)
            self.best.consider(self.trainer.model, scores["accuracy"], epoch, self.trainer.average)
            values = {f"val/{name}": value for name, value in scores.items()}
            record.after_epoch(values | {"val/best_accuracy": self.best.accuracy})
            progress.after_epoch(
                epoch, scores["loss"], scores["accuracy"], state.skipped_steps, record.loss_scale
            )

        with progress:
            fit(
                self.trainer,
                self.loader.epoch,
                epochs=epochs,
                step=self.account.step,
                after_step=after_step,
                after_epoch=after_epoch,
            )

    def validate(self, stop: Stop) -> dict[str, float]:
        """Of the averaged weights where there are any; what it draws at random, training does not notice."""
        windows = WindowLoader(
            self.data.splits["validation"], self.params.batch.planned, seed=self.params.seed
        ).in_order()
        with (
            random_state_kept(self.trainer.precision.device),
            self.trainer.average.swapped_in(),
        ):
            outputs = metrics.logits(self.trainer.model, _until(stop, windows), self.transform)
            return metrics.evaluate(outputs, self.data.classes).scalars


def window_loader(params: Params, data: prepared.Prepared) -> WindowLoader:
    """Of the training split."""
    workers = params.execution.workers if isinstance(params.execution.workers, int) else 0
    return WindowLoader(
        data.splits["train"], params.batch.effective_batch_size, seed=params.seed, workers=workers
    )


def environment(device: torch.device) -> dict[str, Any]:
    """What the last bits of a result depend on, besides the inputs."""
    return {
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


def _until(stop: Stop, windows: Iterator[Window]) -> Iterator[Window]:
    """The windows, left where a signal has come."""
    for window in windows:
        stop.check()
        yield window
