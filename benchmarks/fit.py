"""The largest model, and the largest micro-batch, that completes three windows within a budget of bytes.

    python benchmarks/fit.py                                # four families at 2 and 6 GiB: minutes, no GPU
    python benchmarks/fit.py -f vit -b 4 -c tightfit "textbook loop"
    python benchmarks/fit.py --device cuda --cap-gib 8      # vit_h_14 on a GPU whose memory is capped

Who does what: each contender trains the models of a family (224 pixels, AdamW, clipping, an effective batch of
32, three windows) in a process of its own, within one and the same simulated device: a dispatch mode that
counts the bytes of all living tensors (parameters, gradients, state, activations, inputs), each rounded up to
512 bytes, and raises torch.OutOfMemoryError for the operation whose result would exceed the budget. It goes by
CUDA's rules for all: its lists of autocast, flash attention, and as the optimizer's default its foreach form.
Tensors are fake ones, with shapes and without values, so that models of any size run; whatever a loop reads
from the device (`.item()`) is answered with 1, or False for a truth, by the same mode for all.

All but tightfit and auto_find_batch_size get their micro-batch by trial: the largest power of two with which
they complete, the window being accumulated from as many as it takes. So they are as strong as their users
can make them by hand. "fused" is the textbook loop with the fused AdamW. auto_find_batch_size keeps no
effective batch: what it ends with is all it trains on. tightfit runs what its plan says for the budget,
micro-batch and savers, with recovery around it; where the plan refuses, it is taken not to fit.

Assumed: larger models of a family need more memory (the search bisects). Left out, for all: the CUDA context,
scratch space inside kernels, and fragmentation, which the plan allows for all the same (its replay of the
allocator, and 5 %): it refuses what the simulated device would just have borne. What tightfit keeps in the
host's memory is not counted on the device, but in a column of its own; and its whole window is taken to be on
the device, where the others hold a micro-batch. Time is not compared here: savers cost some (`time` is the
plan's estimate, to a window without savers and without a budget).

The last table is of real tensors: windows within a budget that calls for savers, against the same without
either, at the same micro-batch; gradients and weights are compared bit for bit. Libraries come with
`pip install -e ".[peers]"`; a row says so where one is missing. It needs torch and torchvision alone.
"""

import argparse
import copy
import functools
import gc
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import contenders
import torch
import torchvision
from contenders import MAX_NORM, RATE, Job, Turns
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from workloads import WORKLOADS, Workload

from pipeline.engine import (
    CrossEntropy,
    DoesNotFitError,
    Precision,
    Recovery,
    Trainer,
    allocate_state,
    build_optimizer,
    keep_state_on_host,
    offloaded,
    recompute,
    repeated_blocks,
)
from pipeline.engine.out_of_memory import is_out_of_memory
from pipeline.engine.step import supervised
from pipeline.memory.cuda_rules import flash_attention, install_autocast_lists
from pipeline.memory.ledger import Ledger
from pipeline.memory.planner import Plan, Planner
from pipeline.memory.prediction import CUDA, Device, Prediction, Savers, predict
from pipeline.memory.trace import CUDA_ROUNDING, trace_step, without_memory

GIB, MIB = 2**30, 2**20
WINDOWS = 3
EFFECTIVE = 32
PIXELS = 224
FAMILIES = {  # ascending
    "resnet": ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet101_2"),
    "vit": ("vit_b_16", "vit_l_16", "vit_h_14"),
    "convnext": ("convnext_tiny", "convnext_small", "convnext_base", "convnext_large"),
    "regnet": (
        *("regnet_y_400mf", "regnet_y_800mf", "regnet_y_1_6gf", "regnet_y_3_2gf", "regnet_y_8gf"),
        *("regnet_y_16gf", "regnet_y_32gf", "regnet_y_128gf"),
    ),
}
FIXED, FIXED_GIB, FIXED_WINDOW = "vit_b_16", 3.0, 256
OURS, BASE, SEARCHING = "tightfit", "textbook loop", "HF auto_find_batch_size"
BY_HAND: dict[str, Callable[[Job], None]] = {
    BASE: contenders.textbook,
    "textbook loop, fused": contenders.textbook,
    "Lightning Fabric": contenders.fabric,
    "Lightning Trainer": contenders.lightning_trainer,
    "accelerate": contenders.accelerate,
    "Hugging Face Trainer": contenders.hugging_face,  # its own default is fused
    SEARCHING: contenders.hugging_face,
}
WITHIN: tuple[Savers, ...] = ((), ("uncached_casts",), ("checkpointing_half",), ("checkpointing",))
TO_HOST: tuple[Savers, ...] = ((), ("optimizer_on_host",), ("offload",), ("optimizer_on_host", "offload"))
COMBINATIONS = [one + other for one in WITHIN for other in TO_HOST]
MOST = COMBINATIONS[-1]
DEVICE = Device("simulated", True, 0, 0, CUDA.rates)  # caches, for the margins; no context, no workspaces


class Budget(Ledger):
    """A device of so many bytes; `limit` None: of any number. Reads of fake tensors are answered."""

    def __init__(self, limit: int | None, *, real: bool = False) -> None:
        super().__init__(CUDA_ROUNDING)
        self.limit, self.real = limit, real

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if operation is torch.ops.aten._local_scalar_dense.default and not self.real:
            dtype = arguments[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        results = super().__torch_dispatch__(operation, types, arguments, options)
        if self.limit is not None and self.total > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate in {operation}")
        return results


class Fit(Job):
    """A job whose optimizer is what torch would choose on CUDA."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=RATE, fused=self.equal, foreach=not self.equal)


@dataclass
class Outcome:
    """How a contender completed its windows; `model` is empty where it did not."""

    model: str = ""
    micro_batch: int = 0
    effective: int = EFFECTIVE
    peak: int = 0
    note: str = ""


@functools.cache
def shell(name: str) -> nn.Module:
    return without_memory(lambda: torchvision.models.get_model(name), device="meta")


def fake(name: str) -> nn.Module:
    with _disable_current_modes():  # weights are drawn once a process
        model = copy.deepcopy(shell(name))
    return model.to_empty(device="cpu")


def parameters(name: str) -> float:
    return sum(parameter.numel() for parameter in shell(name).parameters()) / 1e6 if name else 0.0


def build_trainer(model: nn.Module, savers: Savers, size: int, precision: str, device: str) -> Trainer:
    model = model.train()
    for saver, every in (("checkpointing", 1), ("checkpointing_half", 2)):
        if saver in savers:
            recompute(model, repeated_blocks(model), every)
    optimizer = build_optimizer(model, "adamw", lr=RATE, weight_decay=0.01)
    if "optimizer_on_host" in savers:
        keep_state_on_host(optimizer)
    allocate_state(optimizer)
    return Trainer(
        model,
        optimizer,
        CrossEntropy(),
        precision=Precision(precision, device, cache_casts={*savers} <= {*TO_HOST[-1]}),
        micro_batch_size=size,
        max_grad_norm=MAX_NORM,
        forward=offloaded(supervised, model) if "offload" in savers else supervised,
    )


def window(samples: int, pixels: int = PIXELS) -> tuple[Tensor, Tensor]:
    return Workload(nn.Identity, (samples, 3, pixels, pixels)).micro_batch()


def planner(
    build: Callable[[], nn.Module],
    precision: str,
    samples: int,
    *,
    device: Device = DEVICE,
    pixels: int = PIXELS,
    combinations: list[Savers] = COMBINATIONS,
    fixed: int | None = None,
) -> Planner:
    """Of a fake model's training; what it predicts comes from the engine's own step."""

    def measure(savers: Savers, size: int) -> Prediction:
        count = min(2 * size, samples)
        trace = trace_step(
            lambda: (build_trainer(build(), savers, size, precision, "cpu"), window(count, pixels)), cuda=True
        )
        return predict(trace, size, device, samples=count, savers=savers)

    usable = [one for one in combinations if precision != "fp32" or "uncached_casts" not in one]
    return Planner(measure, samples, combinations=usable, fixed=fixed, rates=device.rates)


@contextmanager
def simulated(limit: int) -> Iterator[Budget]:
    budget = Budget(limit)
    with FakeTensorMode(allow_non_fake_inputs=True), flash_attention(), budget:
        yield budget


def does_not_fit(error: BaseException) -> bool:
    reached_zero = "No executable batch size" in str(error)  # of accelerate's
    return is_out_of_memory(error) or isinstance(error, DoesNotFitError) or reached_zero


class Contender:
    """One contender, in a process of its own. taken: micro-batches of each window that are run."""

    def __init__(self, name: str, precision: str, taken: int) -> None:
        self.name, self.precision, self.taken = name, precision, taken
        self.planners: dict[str, Planner] = {}

    def completes(self, model: str, limit: int, samples: int = EFFECTIVE) -> Outcome:
        """With the largest micro-batch that does; tightfit with the one that is planned."""
        if self.name == OURS:
            if model not in self.planners:
                self.planners[model] = planner(lambda: fake(model), self.precision, samples)
            return self._as_planned(model, self.planners[model].plan(limit), samples)
        size = samples
        while size:
            outcome = self._attempt(lambda size=size: self._by_hand(model, limit, size, samples))
            if outcome.model or outcome.note or self.name == SEARCHING:
                return outcome
            size //= 2
        return Outcome()

    def largest_micro_batch(self, model: str, limit: int, samples: int) -> Outcome:
        """Whatever it costs, where the plan alone would take the fastest. A power of two, as all have it."""
        if self.name != OURS:
            return self.completes(model, limit, samples)
        plan = planner(lambda: fake(model), self.precision, samples, combinations=[MOST]).plan(limit)
        size = 2 ** (plan.best.micro_batch_size.bit_length() - 1)
        return self._as_planned(model, replace(plan, best=replace(plan.best, micro_batch_size=size)), samples)

    def _attempt(self, train: Callable[[], Outcome]) -> Outcome:
        try:
            return train()
        except Exception as error:  # whatever a library cannot do here is a row of the report
            note = "" if does_not_fit(error) else f"{type(error).__name__}: {str(error).splitlines()[0][:70]}"
        finally:
            gc.collect()
        return Outcome(note=note)

    def _by_hand(self, model: str, limit: int, size: int, samples: int) -> Outcome:
        steps = min(samples // size, self.taken)
        work = Workload(lambda: fake(model), (size, 3, PIXELS, PIXELS))
        searches, fused = self.name == SEARCHING, "fused" in self.name
        job = Fit(self.name, work, self.precision, WINDOWS, fused, "cpu", Turns([self.name]), steps, searches)
        with simulated(limit) as budget:
            BY_HAND[self.name](job)
        if searches:
            size = samples = len(job.clock.batch["labels"])
        return Outcome(model, size, samples, budget.peak.total)

    def _as_planned(self, model: str, plan: Plan, samples: int) -> Outcome:
        return self._attempt(lambda: self._run(model, plan, samples)) if plan.fits else Outcome()

    def _run(self, model: str, plan: Plan, samples: int) -> Outcome:
        savers, size = plan.best.savers, plan.best.micro_batch_size
        with simulated(plan.budget) as budget:
            trainer = build_trainer(fake(model), savers, size, self.precision, "cpu")
            recovery, batch = Recovery(trainer), window(min(samples, self.taken * size))
            for _ in range(WINDOWS):
                recovery.step(batch)
        note = f"{' '.join(savers) or 'no savers'}; time x{plan.relative_time:.2f}"
        note += f", host {budget.host_peak / MIB:,.0f} MiB, retries {recovery.retries}"
        return Outcome(model, trainer.micro_batch_size, samples, budget.peak.total, note)


def of_family(task: tuple[str, str, int, str, list[float]]) -> list[Outcome]:
    """The largest model within each budget, by bisection; in a fresh process."""
    *who, family, budgets = task
    prepare_process()
    contender, found = Contender(*who), []
    for gib in budgets:
        best, low, high = Outcome(), 0, len(FAMILIES[family])
        while low < high:
            middle = (low + high) // 2
            outcome = contender.completes(FAMILIES[family][middle], round(gib * GIB))
            if outcome.model:
                best, low = outcome, middle + 1
            else:
                best.note, high = best.note or outcome.note, middle
        found.append(best)
    return found


def of_fixed_model(task: tuple[str, str, int]) -> Outcome:
    prepare_process()
    return Contender(*task).largest_micro_batch(FIXED, round(FIXED_GIB * GIB), FIXED_WINDOW)


def prepare_process() -> None:
    """CUDA's rules, for good."""
    warnings.simplefilter("ignore")
    contenders.quiet()
    sys.stdout = open(os.devnull, "w")  # libraries greet
    install_autocast_lists()
    nn.Module.to = nn.Module.cpu = _stay  # type: ignore[method-assign]  # fake parameters cannot be moved


def _stay(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
    return module


def exactness(precision: str) -> str:
    """On real tensors: within a budget that needs savers, and without one."""
    prepare_process()
    lines = []
    for name, size in (("resnet18 64 px x 8", 4), ("vit 64 px x 8", 4)):
        work = WORKLOADS[name]

        def empty(work: Workload = work) -> nn.Module:
            return without_memory(work.build)

        planned = planner(empty, precision, 4 * size, pixels=64, fixed=size)
        most, least = (planned.at(savers, size).required for savers in (COMBINATIONS[0], COMBINATIONS[-1]))
        plan = planned.plan((most + least) // 2)
        free, _, _ = real_windows(work, (), size, None, precision)
        under, peak, retries = real_windows(work, plan.best.savers, size, plan.budget, precision)
        pairs = zip(free, under, strict=True)
        same = all(torch.equal(one, other) for one, other in pairs) and len(free) > 0
        lines.append(
            f"{name.split(' x')[0]:20}{most / MIB:10.1f}{plan.budget / MIB:10.1f}{peak / MIB:10.1f}{retries:9}"
            f"  {'equal' if same else 'NOT EQUAL':11}{' '.join(plan.best.savers) or 'none'}"
        )
    return "\n".join(lines)


def real_windows(
    work: Workload, savers: Savers, size: int, limit: int | None, precision: str
) -> tuple[list[Tensor], int, int]:
    """Each window's clipped gradients and the weights in the end; bytes at the peak, windows taken again."""
    kept: list[Tensor] = []
    with flash_attention(), Budget(limit, real=True) as budget:
        trainer = build_trainer(work.model(), savers, size, precision, "cpu")
        weights = list(trainer.model.parameters())

        def keep(*_: Any) -> None:
            with _disable_current_modes():
                kept.extend(weight.grad.clone() for weight in weights)

        trainer.optimizer.register_step_pre_hook(keep)
        recovery, batch = Recovery(trainer), window(4 * size, 64)
        for _ in range(WINDOWS):
            recovery.step(batch)
    return [*kept, *weights], budget.peak.total, recovery.retries


def table(title: str, rows: dict[str, Outcome]) -> None:
    print(
        f"\n{title}\n{'':24}{'largest model':18}{'params M':>9}{'micro':>7}{'batch':>7}{'peak MiB':>10}  note"
    )
    for name, row in rows.items():
        if row.model:
            numbers = f"{row.micro_batch:7}{row.effective:7}{row.peak / MIB:10,.0f}"
            print(f"{name:24}{row.model:18}{parameters(row.model):9.1f}{numbers}  {row.note}")
        else:
            print(f"{name:24}{row.note or 'none fits'}")


def compare(arguments: argparse.Namespace) -> None:
    names, budgets, precision = arguments.contenders, arguments.budgets, arguments.precision
    print(f"torch {torch.__version__}, simulated device, {precision}, effective batch {EFFECTIVE}")
    who = [(name, precision, arguments.micro_batches) for name in names]
    ratios = []
    with multiprocessing.get_context("spawn").Pool(arguments.processes, maxtasksperchild=1) as pool:
        for family in arguments.families:
            tasks = [(*one, family, budgets) for one in who]
            found = dict(zip(names, pool.map(of_family, tasks, chunksize=1), strict=True))
            for index, gib in enumerate(budgets):
                rows = {name: outcomes[index] for name, outcomes in found.items()}
                table(f"{family} within {gib:g} GiB", rows)
                ratios.append(ratio(f"{family} {gib:g} GiB", rows))
        rows = dict(zip(names, pool.map(of_fixed_model, who, 1), strict=True))
        table(f"{FIXED} within {FIXED_GIB:g} GiB: largest micro-batch of a window of {FIXED_WINDOW}", rows)
        print(f"\nreal tensors, {precision}: gradients of {WINDOWS} windows, and weights")
        print(f"{'MiB':20}{'needed':>10}{'budget':>10}{'peak':>10}{'retries':>9}  bits       savers")
        print(pool.apply(exactness, (precision,)))
    print(
        "\nparameters of tightfit over the textbook loop's (and the best of the others at the same batch): "
    )
    print("; ".join(filter(None, ratios)))


def ratio(title: str, rows: dict[str, Outcome]) -> str:
    ours, base = (parameters(rows[name].model) if name in rows else 0.0 for name in (OURS, BASE))
    others = (row for name, row in rows.items() if name != OURS and row.effective == EFFECTIVE)
    best = max((parameters(row.model) for row in others), default=0.0)
    return f"{title} x{ours / base:.2f} (x{ours / best:.2f})" if base else ""


def predicted_for_cuda(cap: int, precision: str) -> tuple[Plan, int, int]:
    """The plan; allocated and reserved bytes. In a process that sees no GPU."""
    prepare_process()
    device = Device("cuda", True, 0, CUDA.workspace_bytes, CUDA.rates)  # the cap is the allocator's alone
    plan = planner(lambda: fake("vit_h_14"), precision, EFFECTIVE, device=device).plan(cap)
    return plan, plan.best.allocated, plan.best.reserved


def without_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def on_cuda(cap_gib: float, precision: str) -> None:
    with multiprocessing.get_context("spawn").Pool(1, without_gpu) as pool:
        plan, allocated, reserved = pool.apply(predicted_for_cuda, (round(cap_gib * GIB), precision))
    savers, size = plan.best.savers, plan.best.micro_batch_size
    print(f"vit_h_14 within {cap_gib:g} GiB: micro-batch {size}, savers {' '.join(savers) or 'none'}")
    if not plan.fits:
        raise SystemExit(f"the plan refuses: {plan.best.required / MIB:,.0f} MiB are required")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gib * GIB / total))
    model = torchvision.models.get_model("vit_h_14").cuda()
    trainer = build_trainer(model, savers, size, precision, "cuda")
    recovery, batch = Recovery(trainer), window(EFFECTIVE)
    for _ in range(WINDOWS):
        result = recovery.step(batch)
        print(f"window {result.step}: loss {result.loss:.4f}, {result.seconds:.2f} s", flush=True)
    torch.cuda.synchronize()
    print(f"retries {recovery.retries}, micro-batch {trainer.micro_batch_size}; MiB predicted and measured")
    for what, guess, found in (
        ("allocated", allocated, torch.cuda.max_memory_allocated()),
        ("reserved", reserved, torch.cuda.max_memory_reserved()),
    ):
        print(f"{what:10}{guess / MIB:10,.0f}{found / MIB:10,.0f}{guess / found - 1:+8.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*BY_HAND, OURS]
    parser.add_argument("-f", "--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("-b", "--budgets", nargs="+", type=float, default=[2.0, 6.0], help="GiB")
    parser.add_argument("-c", "--contenders", nargs="+", choices=names, default=names)
    parser.add_argument("-p", "--precision", choices=("fp32", "amp_bf16"), default="amp_bf16")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a window that are run at most")
    parser.add_argument("--processes", type=int, default=1, help="contenders at work at once")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cap-gib", type=float, default=8.0, help="with --device cuda")
    arguments = parser.parse_args()
    started = time.perf_counter()
    if arguments.device == "cuda":
        on_cuda(arguments.cap_gib, arguments.precision)
    else:
        compare(arguments)
        print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
