"""One trace, in a process of its own: the training that params.yaml describes, on fake tensors.

    python -m pipeline.stages.tracing < request.json > trace.json

A trace changes torch for the whole process (see memory.cuda_rules), so `measure` starts one for each.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import torch

from pipeline import config, models
from pipeline.config import Params
from pipeline.data import prepared
from pipeline.engine import Trainer
from pipeline.errors import UserError
from pipeline.memory.ledger import Peak
from pipeline.memory.trace import Trace, TraceError, trace_step, without_memory
from pipeline.stages.setup import build_trainer, image_set

SECONDS = 300  # after which a trace is given up; one takes 2 to 10


def measure(params: Params, description: dict[str, Any], samples: int, *, cuda: bool) -> Trace:
    """Traces one window of `samples` samples at batch.micro_batch_size. Raises UserError where that fails.

    description: dataset.json's content. cuda: by CUDA's rules, else by this CPU's.
    """
    request = {
        "params": config.to_yaml(params),
        "description": description,
        "samples": samples,
        "cuda": cuda,
    }
    command = [sys.executable, "-W", "ignore", "-m", "pipeline.stages.tracing"]
    done = subprocess.run(
        command,
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # nothing of it may touch a device
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"
        raise UserError(f"model {params.model.name} cannot be traced: {reason}")
    answer = json.loads(done.stdout)
    events = [(key, size) for key, size in answer["events"]]
    return Trace(Peak(**answer["peak"]), answer["peaks"], events, answer["seconds"])


def trace(params: Params, description: dict[str, Any], samples: int, *, cuda: bool) -> Trace:
    """As `measure`, in this process."""
    data = prepared.Prepared(description, {})
    images = image_set(data)

    def build() -> tuple[Trainer, dict[str, torch.Tensor]]:
        section, classes = params.model, len(images.classes)
        model = without_memory(lambda: models.build(section.name, section.args, classes, images.channels))
        transform = models.prepare_transform(model, section.name, "none", images)
        trainer = build_trainer(params, model.train(), transform, data, total_steps=1)
        window = {
            "images": torch.zeros(samples, images.channels, images.size, images.size, dtype=torch.uint8),
            "labels": torch.zeros(samples, dtype=torch.int64),
            "ids": torch.arange(samples),
        }
        return trainer, window

    return trace_step(build, cuda=cuda)


def main() -> int:
    request = json.load(sys.stdin)
    answers, sys.stdout = sys.stdout, sys.stderr  # what a model prints is no answer
    params = config.parse(request["params"])
    # compiled code is traced as what it was made from, and channels_last has the same bytes
    execution = replace(params.execution, compile=False, channels_last=False)
    try:
        result = trace(
            replace(params, execution=execution),
            request["description"],
            request["samples"],
            cuda=request["cuda"],
        )
    except (UserError, TraceError) as error:
        print(error, file=sys.stderr)
        return 2
    json.dump(asdict(result), answers)
    answers.flush()  # Python flushes at its end what is sys.stdout then
    return 0


if __name__ == "__main__":
    sys.exit(main())
