"""Traces of the training that params.yaml describes, on fake tensors, in a process of their own.

    python -m pipeline.stages.tracing          # a request a line in, an answer a line out, both JSON

CUDA's rules change torch for the whole process (see memory.cuda_rules), so those traces are made by workers,
which import torch once for all of them. A trace by the CPU's own rules changes nothing and is made here.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import psutil
import torch
from torch import nn

from pipeline import config, models
from pipeline.config import Params
from pipeline.data import prepared
from pipeline.engine import Trainer
from pipeline.engine.window import Batch
from pipeline.errors import UserError
from pipeline.memory.cuda_rules import install_autocast_lists
from pipeline.memory.ledger import Peak
from pipeline.memory.trace import (
    CUDA_ROUNDING,
    Trace,
    TraceError,
    count_step,
    trace_step,
    without_memory,
)
from pipeline.memory.workload import WORKLOADS
from pipeline.stages.setup import build_forward, build_loss, build_trainer, image_set

SECONDS = 300  # after which a trace is given up; one takes 2 to 10
WORKERS = 2  # a trace keeps one core busy, and takes up to 1 GB of memory
HOST_COPIES = 6  # a real step's weights, gradients, state and casts, and as much again for activations


class TracingError(UserError):
    """A model that cannot be traced; the message names operation and module."""


class Tracer:
    """Makes traces, each of one window of `samples` samples; a context manager, because of its workers.

    description: dataset.json's content. cuda: by CUDA's rules, else by this CPU's.
    """

    def __init__(self, description: dict[str, Any], *, cuda: bool) -> None:
        self._description = description
        self._cuda = cuda
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._workers = [_Worker() for _ in range(WORKERS)]
        for worker in reversed(self._workers):
            self._idle.put(worker)
        self._pool = ThreadPoolExecutor(WORKERS)

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.end()
        self._pool.shutdown()

    def trace(self, params: Params, samples: int) -> Trace:
        """On fake tensors. Raises TracingError where the model does not allow that."""
        if self._cuda:
            return self._asked(params, samples, real=False)
        try:
            return trace(as_traced(params), self._description, samples, cuda=False)
        except TraceError as error:
            raise TracingError(_untraceable(params, error)) from None

    def ahead(self, params: Params, samples: int) -> Future[Trace] | None:
        """As `trace`, begun now on another core, for later; None where traces are made in this process."""
        return self._pool.submit(self.trace, params, samples) if self._cuda else None

    def measure(self, params: Params, samples: int) -> Trace:
        """On real tensors of the CPU: one step is taken and counted, which needs the memory to do so."""
        return self._asked(params, samples, real=True)

    def _asked(self, params: Params, samples: int, *, real: bool) -> Trace:
        request = {
            "params": config.to_yaml(params),
            "description": self._description,
            "samples": samples,
            "cuda": self._cuda,
            "real": real,
        }
        worker = self._idle.get()
        try:
            answer = worker.ask(request)
        except OSError as error:
            raise TracingError(_untraceable(params, error)) from None
        finally:
            self._idle.put(worker)
        if "error" in answer:
            raise (TracingError if answer["traced"] else UserError)(answer["error"])
        events = [(key, size) for key, size in answer.pop("events")]
        return Trace(**answer | {"peak": Peak(**answer["peak"]), "events": events})


class _Worker:
    """A process that answers requests, started with the first one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in `end`

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises OSError, with what the process said last, where it ends instead of answering."""
        process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            self._process = None
            raise OSError(self._last_words(process.wait()))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _started(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "pipeline.stages.tracing"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # nothing of it may touch a device
        )
        return self._process

    def _last_words(self, code: int) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else f"its process ended with {code}"


def _untraceable(params: Params, reason: object) -> str:
    return f"model {params.model.name} cannot be traced: {reason}"


def as_traced(params: Params) -> Params:
    """Compiled code is traced as what it was made from, and channels_last has the same bytes."""
    return replace(params, execution=replace(params.execution, compile=False, channels_last=False))


def trace(params: Params, description: dict[str, Any], samples: int, *, cuda: bool) -> Trace:
    """One window on fake tensors, in this process. Raises TraceError."""

    def build() -> tuple[Trainer, Batch]:
        model = without_memory(lambda: build_model(params, description))
        return trained(params, model, description, samples)

    return trace_step(build, cuda=cuda)


def measure(params: Params, description: dict[str, Any], samples: int, *, cuda: bool) -> Trace:
    """One window on real tensors, in this process. Raises UserError where the host has not the memory."""
    if cuda:
        install_autocast_lists()
    model = build_model(params, description)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    available = psutil.virtual_memory().available
    if weights * HOST_COPIES > available:
        raise UserError(
            f"{_untraceable(params, 'and a real step of it needs more than the')} "
            f"{available / 2**30:.1f} GiB that are free here"
        )
    return count_step(*trained(params, model, description, samples), round_to=CUDA_ROUNDING if cuda else 1)


def build_model(params: Params, description: dict[str, Any]) -> nn.Module:
    section = params.model
    return models.build(section.name, section.args, len(description["classes"]), description["shape"][0])


def trained(
    params: Params, model: nn.Module, description: dict[str, Any], samples: int
) -> tuple[Trainer, Batch]:
    """The step and a blank window: as train has them, or of the kind of a model that is planned alone."""
    kind = models.kind(params.model.name)
    if kind != "classification":
        work = WORKLOADS[kind]
        trainer = build_trainer(params, model.train(), work.forward, work.loss, total_steps=1)
        return trainer, work.window(samples, description["shape"][-1])
    data = prepared.Prepared(description, {})
    transform = models.prepare_transform(model, params.model.name, "none", image_set(data))
    forward, loss = build_forward(params, model, transform), build_loss(params, data)
    trainer = build_trainer(params, model.train(), forward, loss, total_steps=1)
    return trainer, blank(description, samples)


def blank(description: dict[str, Any], samples: int) -> dict[str, torch.Tensor]:
    channels, height, width = description["shape"]
    return {
        "images": torch.zeros(samples, channels, height, width, dtype=torch.uint8),
        "labels": torch.zeros(samples, dtype=torch.int64),
        "ids": torch.arange(samples),
    }


def answered(request: dict[str, Any]) -> dict[str, Any]:
    params = as_traced(config.parse(request["params"]))
    try:
        take = measure if request["real"] else trace
        result = take(params, request["description"], request["samples"], cuda=request["cuda"])
    except TraceError as error:
        return {"error": _untraceable(params, error), "traced": True}
    except UserError as error:
        return {"error": str(error), "traced": False}
    return asdict(result)


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what a model prints is no answer
    for line in sys.stdin:
        print(json.dumps(answered(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
