"""Predicted peaks of torchvision's models, without a GPU; with one, beside what the device measured.

    python benchmarks/memory.py                    # seven models at micro-batches 1, 8 and 32
    python benchmarks/memory.py --published        # peaks that others measured on GPUs
    python benchmarks/memory.py --all              # classifiers, segmentation and video, at micro-batch 2
    python benchmarks/memory.py --device cuda      # predicted and measured here, allocated and reserved

amp_fp16 with loss scaling, AdamW (foreach), two micro-batches a window, no clipping, float32 pixels, casts of
weights kept for a micro-batch. It needs torch and torchvision alone. Every prediction is made in a process of
its own that sees no GPU; `seconds` are of all that it does there, after the imports.

--published: one micro-batch a window, each with the optimizer and the pixels that its source states or its
configuration has. The last two are taken for float32's, as with AMP they would need half to two thirds of
what was published. What a trace lacks is scratch space inside kernels (cuDNN's above all), and the copy of
the gradients that DistributedDataParallel keeps, where it was used.

The first table's `other` are peaks that an independent study of the same configuration found. The study held
the inputs of one micro-batch; here, as in the engine, which copies one ahead, those of both are there (for 32
images 18.4 MiB, 1.0 % of resnet50's peak). `alike` is the error without that second micro-batch's inputs.

On a GPU the caching allocator also holds the workspaces of cuBLAS, which no trace knows (8 MiB, on Hopper 32,
for each thread that multiplies: forward and backward). They are measured before the model is there and taken
off both peaks. cuDNN's workspaces are not: they come and go inside a convolution, and are part of the error.
"""

import argparse
import functools
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.models import VisionTransformer
from torchvision.models.resnet import Bottleneck, ResNet

from pipeline.engine import Precision, Trainer, WeightAverage, allocate_state
from pipeline.memory.allocator import replay
from pipeline.memory.trace import trace_step, without_memory
from pipeline.memory.workload import WORKLOADS, Workload

MIB = 2**20
GB = 1e9 / MIB  # in MiB
MODULES = {
    "classification": torchvision.models,
    "segmentation": torchvision.models.segmentation,
    "video": torchvision.models.video,
}
SIZES = (1, 8, 32)
NOTED = {  # MiB allocated, at these micro-batches
    "resnet50": (489, 785, 1801),
    "vit_b_16": (1652, 2012, 3580),
    "vit_l_16": (5806, 6590, 10674),
    "convnext_large": (3772, 4892, 9291),
    "swin_b": (1675, 2647, 6033),
    "efficientnet_v2_l": (2263, 3726, 8778),
    "regnet_y_128gf": (12301, 13691, 20968),
}
ON_CUDA = {  # kinds of models, at micro-batches that make the activations count
    **{"resnet18": 64, "resnet50": 32, "mobilenet_v3_large": 64, "densenet121": 32, "regnet_y_128gf": 8},
    **{"efficientnet_v2_l": 8, "convnext_tiny": 32, "convnext_large": 8, "vit_b_16": 32, "vit_l_16": 8},
    **{"swin_b": 16, "swin_v2_t": 16, "fcn_resnet50": 4, "r3d_18": 8, "mvit_v2_s": 4},
}


@dataclass(frozen=True)
class Case:
    """One training whose window is traced or taken."""

    model: str
    micro_batch_size: int
    micro_batches: int = 2
    precision: str = "amp_fp16"  # or pure_bf16: weights, gradients and state too
    optimizer: str = "adamw"
    fused: bool = False
    cache_casts: bool = False  # over the window
    average: float = 0.0
    classes: int | None = None
    pixels: int = 0  # 0: the model's own

    @property
    def workload(self) -> Workload:
        """Of torchvision's kind, or of classification."""
        kinds = (kind for kind, module in MODULES.items() if self.model in names(module))
        return WORKLOADS[next(kinds, "classification")]


ADAM = "'about 6 GB' read as 1e9 bytes; PyTorch tutorial, optimizer step in backward"
SWIN_V2 = "weight average as in the recipe, labels as indices; torchvision PR 6246"
VIT_H = "torchvision's model for timm's; torchao's README, low-bit optimizers"
VIT_G = "SwiGLU as an MLP of as many weights, no LayerScale; torchao's README, optimizer offload"
RESNET = "AdamW for LAMB, DDP's buckets left out; mmengine PR 960"
SWIN = "as AMP would take 4,700; DDP's buckets left out; mmengine 651"
RESNEXT = "as AMP would take 3,000; DDP's buckets left out; mmengine 651"
PUBLISHED = {  # MiB, and what is assumed; the source
    Case("vit_l_16", 1, 1, "fp32", "adam"): (6 * GB, ADAM),
    Case("swin_v2_t", 128, 1, average=0.9999, pixels=256): (14880, SWIN_V2),
    Case("vit_h_14", 8, 1, "amp_bf16", fused=True, classes=45): (12.23 * GB, VIT_H),
    Case("dinov2_giant", 32, 1, "pure_bf16", fused=True, classes=45): (9.82 * GB, VIT_G),
    Case("resnet50", 256, 1): (11481, RESNET),
    Case("resnet50", 256, 1, "fp32"): (21665, RESNET),
    Case("swin_t", 64, 1, "fp32"): (7154, SWIN),
    Case("resnext101_32x4d", 32, 1, "fp32", "sgd"): (5839, RESNEXT),
}


def names(module: Any) -> list[str]:
    return sorted(torchvision.models.list_models(module=module))


def constructed(case: Case) -> nn.Module:
    options: dict[str, Any] = {} if case.classes is None else {"num_classes": case.classes}
    if case.model == "dinov2_giant":
        return checkpointed(VisionTransformer(224, 14, 40, 24, 1536, 6144, **options))
    if case.model == "resnext101_32x4d":
        return ResNet(Bottleneck, [3, 4, 23, 3], groups=32, width_per_group=4)
    if case.model in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": False}
    if case.workload.label_maps:
        options |= {"weights_backbone": None}
        if not case.model.startswith("lraspp"):
            options |= {"aux_loss": True}  # as torchvision's references train them
    return torchvision.models.get_model(case.model, **options)


def checkpointed(model: VisionTransformer) -> nn.Module:
    for block in model.encoder.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def build_trainer(model: nn.Module, case: Case, device: str) -> Trainer:
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    momentum = {"momentum": 0.9} if case.optimizer == "sgd" else {}
    optimizer = kinds[case.optimizer](
        model.train().parameters(), fused=case.fused or None, foreach=not case.fused or None, **momentum
    )
    allocate_state(optimizer)
    precision = "fp32" if case.precision == "pure_bf16" else case.precision
    return Trainer(
        model,
        optimizer,
        case.workload.loss,
        precision=Precision(precision, device, cache_casts=case.cache_casts),
        micro_batch_size=case.micro_batch_size,
        average=WeightAverage(model, case.average),
        forward=case.workload.forward,
    )


def window(case: Case, device: str) -> tuple[Tensor, Tensor]:
    return case.workload.window(
        case.micro_batches * case.micro_batch_size,
        case.pixels or case.workload.pixels_of(case.model),
        dtype=torch.bfloat16 if case.precision == "pure_bf16" else torch.float32,
        device=device,
    )


class Predicted(NamedTuple):
    allocated: float  # MiB, as the next
    reserved: float
    seconds: float
    module: str  # at the peak


def predicted(case: Case) -> Predicted:
    """In a process that does nothing else: CUDA's rules are for good."""
    warnings.simplefilter("ignore")
    started = time.perf_counter()

    def constructed_here() -> nn.Module:
        model = constructed(case)
        return model.bfloat16() if case.precision == "pure_bf16" else model

    trace = trace_step(
        lambda: (build_trainer(without_memory(constructed_here), case, "cpu"), window(case, "cpu")),
        cuda=True,
    )
    reserved = replay(trace.events).peak_reserved
    return Predicted(trace.peak.total / MIB, reserved / MIB, time.perf_counter() - started, trace.peak.module)


def without_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def traced(cases: Iterable[Case], columns: str) -> Iterator[tuple[Case, Predicted]]:
    """Each in a fresh process, in order, with its row printed so far; what cannot be traced is a row too."""
    print(f"{'MiB':20}{'micro':>6}{'allocated':>11}{'reserved':>10}{'seconds':>9}{columns}")
    with multiprocessing.get_context("spawn").Pool(1, without_gpu, maxtasksperchild=1) as pool:
        for case in cases:
            print(f"{case.model:20}{case.micro_batch_size:6}", end="", flush=True)
            try:
                found = pool.apply(predicted, (case,))
            except Exception as error:
                print(f"  {error}")
                continue
            print(f"{found.allocated:11,.0f}{found.reserved:10,.0f}{found.seconds:9.1f}", end="", flush=True)
            yield case, found


def workspaces() -> float:
    """MiB that cuBLAS keeps, of this thread and of autograd's, after products in both precisions."""
    for dtype in (torch.float32, torch.float16):
        weight = torch.ones(64, 64, device="cuda", dtype=dtype, requires_grad=True)
        bias = torch.ones(64, device="cuda", dtype=dtype, requires_grad=True)
        F.linear(weight, weight, bias).sum().backward()
        torch.bmm(weight[None], weight[None]).sum().backward()
        del weight, bias
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() / MIB


def measured(case: Case) -> tuple[float, float, float]:
    """MiB allocated and reserved by a window in its steady state, and of cuBLAS; in a fresh process."""
    kept = workspaces()
    model = constructed(case).cuda()
    trainer, batch = build_trainer(model, case, "cuda"), window(case, "cuda")
    trainer.step(batch)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer.step(batch)
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return allocated / MIB - kept, reserved / MIB - kept, kept


def summary(name: str, errors: list[float]) -> None:
    if absolute := sorted(map(abs, errors)):
        middle = statistics.median(absolute)
        print(f"{name}: median {middle:.1%}, worst {absolute[-1]:.1%} of {len(absolute)}")


def noted() -> None:
    cases = [Case(model, size) for model in NOTED for size in SIZES]
    errors, alike = [], []
    for case, found in traced(cases, f"{'other':>8}{'error':>8}{'alike':>8}  peak in"):
        other = NOTED[case.model][SIZES.index(case.micro_batch_size)]
        inputs = sum(part.nbytes for part in window(replace(case, micro_batches=1), "meta")) / MIB
        errors.append(found.allocated / other - 1)
        alike.append((found.allocated - inputs) / other - 1)
        print(f"{other:8,}{errors[-1]:+8.1%}{alike[-1]:+8.1%}  {found.module}", flush=True)
    summary("error", errors)
    summary("alike", alike)


def published() -> None:
    errors = []
    for case, found in traced(PUBLISHED, f"{'published':>11}{'error':>8}  precision, assumed; source"):
        peak, said = PUBLISHED[case]
        errors.append(found.allocated / peak - 1)
        print(f"{peak:11,.0f}{errors[-1]:+8.1%}  {case.precision}, {said}", flush=True)
    summary("error", errors)


def every_model() -> None:
    cases = [Case(model, 2) for module in MODULES.values() for model in names(module)]
    seconds = {}
    for case, found in traced(cases, "  peak in"):
        seconds[case.model] = found.seconds
        print(f"  {found.module}", flush=True)
    slowest = max(seconds, key=seconds.__getitem__)
    print(f"traced {len(seconds)} of {len(cases)}; slowest {slowest}, {seconds[slowest]:.1f} s")


def on_cuda(as_trained: bool) -> None:
    cases = [Case(*one, fused=as_trained, cache_casts=as_trained) for one in ON_CUDA.items()]
    columns = f"{'measured':>11}{'error':>8}{'reserved':>10}{'error':>8}{'cuBLAS':>8}"
    errors: tuple[list[float], list[float]] = [], []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for case, found in traced(cases, columns):
            try:
                allocated, reserved, kept = pool.apply(measured, (case,))
            except Exception as error:  # a GPU that is too small for it
                print(f"  {str(error).splitlines()[0]}")
                continue
            errors[0].append(found.allocated / allocated - 1)
            errors[1].append(found.reserved / reserved - 1)
            print(f"{allocated:11,.0f}{errors[0][-1]:+8.1%}{reserved:10,.0f}{errors[1][-1]:+8.1%}{kept:8.0f}")
    summary("allocated", errors[0])
    summary("reserved", errors[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--published", action="store_true", help="peaks that others measured")
    parser.add_argument("--all", action="store_true", help="every model of torchvision, at micro-batch 2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--as-trained", action="store_true", help="on cuda: fused AdamW, casts cached a window"
    )
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        on_cuda(arguments.as_trained)
    elif arguments.published:
        published()
    elif arguments.all:
        every_model()
    else:
        noted()


if __name__ == "__main__":
    main()
