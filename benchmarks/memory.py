"""Predicted peaks of torchvision's models, without a GPU; with one, beside what the device measured.

    python benchmarks/memory.py                    # seven models at micro-batches 1, 8 and 32
    python benchmarks/memory.py --all              # every classifier of torchvision at micro-batch 2
    python benchmarks/memory.py --device cuda      # predicted and measured, allocated and reserved

amp_fp16 with loss scaling, AdamW, two micro-batches a window, 224 px, no clipping. `noted` are peaks that an
independent study of the same configuration found (foreach AdamW, casts of weights kept for a micro-batch),
which is why this traces foreach and no cast cache over the window unless --as-trained is given.
"""

import argparse
import multiprocessing
import statistics
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torchvision
from torch import nn

from pipeline.engine import CrossEntropy, Precision, Trainer, allocate_state
from pipeline.memory.allocator import replay
from pipeline.memory.trace import trace_step, without_memory

MIB = 2**20
PIXELS = 224
NOTED = {  # MiB allocated, at micro-batches 1, 8 and 32
    "resnet50": (489, 785, 1801),
    "vit_b_16": (1652, 2012, 3580),
    "vit_l_16": (5806, 6590, 10674),
    "convnext_large": (3772, 4892, 9291),
    "swin_b": (1675, 2647, 6033),
    "efficientnet_v2_l": (2263, 3726, 8778),
    "regnet_y_128gf": (12301, 13691, 20968),
}


@dataclass(frozen=True)
class Configuration:
    model: str
    micro_batch_size: int
    as_trained: bool  # fused optimizer and the window's cast cache, as the engine trains by default


def build_trainer(model: nn.Module, configuration: Configuration, device: str) -> Trainer:
    fused = configuration.as_trained
    optimizer = torch.optim.AdamW(model.train().parameters(), fused=fused or None, foreach=not fused or None)
    allocate_state(optimizer)
    return Trainer(
        model,
        optimizer,
        CrossEntropy(),
        precision=Precision("amp_fp16", device, cache_casts=configuration.as_trained),
        micro_batch_size=configuration.micro_batch_size,
    )


def window(configuration: Configuration, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    samples = 2 * configuration.micro_batch_size
    side = 299 if configuration.model == "inception_v3" else PIXELS
    return (
        torch.zeros(samples, 3, side, side, device=device),
        torch.zeros(samples, dtype=torch.int64, device=device),
    )


def constructed(name: str) -> nn.Module:
    plain = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return torchvision.models.get_model(name, **plain)


def predicted(configuration: Configuration) -> tuple[float, float, float, str]:
    """MiB allocated and reserved, seconds, and the module at the peak; in a process of its own."""
    warnings.simplefilter("ignore")
    trace = trace_step(
        lambda: (
            build_trainer(without_memory(lambda: constructed(configuration.model)), configuration, "cpu"),
            window(configuration, "cpu"),
        ),
        cuda=True,
    )
    reserved = replay(trace.events).peak_reserved
    return trace.peak.total / MIB, reserved / MIB, trace.seconds, trace.peak.module


def measured(configuration: Configuration) -> tuple[float, float]:
    """MiB allocated and reserved on the GPU, over two windows."""
    model = constructed(configuration.model).cuda()
    trainer, batch = build_trainer(model, configuration, "cuda"), window(configuration, "cuda")
    trainer.step(batch)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer.step(batch)
    peaks = torch.cuda.max_memory_allocated() / MIB, torch.cuda.max_memory_reserved() / MIB
    del model, trainer, batch
    torch.cuda.empty_cache()
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every classifier, at micro-batch 2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--as-trained", action="store_true", help="fused AdamW, casts kept over the window")
    arguments = parser.parse_args()
    names = sorted(torchvision.models.list_models(module=torchvision.models)) if arguments.all else NOTED
    sizes = (2,) if arguments.all else (1, 8, 32)
    print(
        f"{'':24}{'micro':>6}{'allocated':>11}{'reserved':>10}{'other':>9}{'error':>8}{'seconds':>9}  peak in"
    )
    errors = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in names:
            for place, size in enumerate(sizes):
                configuration = Configuration(name, size, arguments.as_trained)
                try:
                    allocated, reserved, seconds, module = pool.apply(predicted, (configuration,))
                except Exception as error:  # a model that cannot be traced is a row of the report
                    print(f"{name:24}{size:6}  {error}")
                    continue
                other = None
                if arguments.device == "cuda":
                    other, _ = measured(configuration)
                elif not arguments.all:
                    other = NOTED[name][place]
                said = ""
                if other is not None:
                    errors.append(allocated / other - 1)
                    said = f"{other:9,.0f}{errors[-1]:+8.1%}"
                print(
                    f"{name:24}{size:6}{allocated:11,.0f}{reserved:10,.0f}{said:17}{seconds:9.1f}  {module}",
                    flush=True,
                )
    if errors:
        absolute = sorted(map(abs, errors))
        print(f"error: median {statistics.median(absolute):.1%}, worst {absolute[-1]:.1%}")


if __name__ == "__main__":
    main()
