"""The largest model, and the largest micro-batch, that completes three windows within a budget of bytes.

    python benchmarks/fit.py --processes 2                  # four families at 2 and 6 GiB, without a GPU
    python benchmarks/fit.py -f vit -b 4 -c tightfit "textbook loop"
    python benchmarks/fit.py --device cuda --cap-gib 8      # vit_h_14 on a GPU whose memory is capped

Each contender trains the models of a family (224 pixels, AdamW, clipping, an effective batch of 32) in a
process of its own, within the same simulated device: a dispatch mode that counts the bytes of all living
tensors (parameters, gradients, state, activations, inputs), each rounded up to 512, and raises
torch.OutOfMemoryError for the operation whose result exceeds the budget. CUDA's rules hold for all:
autocast's lists, flash attention, and AdamW's default, its foreach form. Tensors are fake ones,
with shapes and without values, so that models of any size run; what a loop reads from the device (`.item()`)
is answered with 1, or False for a truth, by the same mode for all. Of a window two micro-batches are run
(--micro-batches): more take no more memory.

All but tightfit and auto_find_batch_size get their micro-batch by trial: the largest power of two with which
they complete, the window accumulated from as many as it takes. So they are as strong as their users can make
them by hand; "fused" is the textbook loop with the fused AdamW. auto_find_batch_size keeps no effective
batch: what it ends with (`batch`) is all it trains on. tightfit runs what its plan says for the budget, with
recovery around it; where the plan refuses, it is taken not to fit. `time` is the plan's estimate of what its
savers cost, to a window without savers and without a budget; what they keep in the host's memory is not on
the device and stands beside.

Assumed: larger models of a family need more memory (the search bisects). Left out, for all: the CUDA context,
scratch space inside kernels, fragmentation. The plan allows for the last all the same (a replay of the
allocator, and 5 %), so that it refuses what this device would just have borne.

The last table is of real tensors: windows within a budget that calls for savers, against the same without
either, at the same micro-batch; gradients and weights are compared bit for bit. Libraries come with
`pip install -e ".[peers]"`; a row says so where one is missing. On a GPU torch and torchvision are enough.
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

from pipeline import engine
from pipeline.engine.out_of_memory import is_out_of_memory
from pipeline.engine.step import supervised
from pipeline.memory.cuda_rules import flash_attention, install_autocast_lists
from pipeline.memory.ledger import Ledger
from pipeline.memory.planner import Plan, Planner
from pipeline.memory.prediction import CUDA, MIB, Device, Prediction, Savers, predict
from pipeline.memory.trace import CUDA_ROUNDING, trace_step, without_memory

GIB = 2**30
WINDOWS, EFFECTIVE, PIXELS = 3, 32, 224
REGNETS = ("400mf", "800mf", "1_6gf", "3_2gf", "8gf", "16gf", "32gf", "128gf")
FAMILIES = {  # ascending
    "resnet": ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet101_2"],
    "vit": ["vit_b_16", "vit_l_16", "vit_h_14"],
    "convnext": [f"convnext_{size}" for size in ("tiny", "small", "base", "large")],
    "regnet": [f"regnet_y_{size}" for size in REGNETS],
}
FIXED, FIXED_GIB, FIXED_WINDOW = "vit_b_16", 3.0, 256
OURS, BASE, SEARCHING = "tightfit", "textbook loop", "HF auto_find_batch_size"
OTHERS: dict[str, Callable[[Job], None]] = {
    BASE: contenders.textbook,
    "textbook loop, fused": contenders.textbook,
    "Lightning Trainer": contenders.lightning_trainer,
    "accelerate": contenders.accelerate,
    "Hugging Face Trainer": contenders.hugging_face,  # its own default is fused
    SEARCHING: contenders.hugging_face,
}
WITHIN: tuple[Savers, ...] = ((), ("uncached_casts",), ("checkpointing_half",), ("checkpointing",))
TO_HOST: tuple[Savers, ...] = ((), ("optimizer_on_host",), ("offload",), ("optimizer_on_host", "offload"))
COMBINATIONS = [one + other for one in WITHIN for other in TO_HOST]
SIMULATED = Device("simulated", True, 0, 0, CUDA.rates)  # no context, no workspaces; the plan's margins


class Budget(Ledger):
    """A device of `limit` bytes, None for any number. fake: reads are answered."""

    def __init__(self, limit: int | None, *, fake: bool = True) -> None:
        super().__init__(CUDA_ROUNDING)
        self.limit, self.fake = limit, fake

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if self.fake and operation is torch.ops.aten._local_scalar_dense.default:
            return {torch.bool: False, torch.int64: 1}.get(arguments[0].dtype, 1.0)
        results = super().__torch_dispatch__(operation, types, arguments, options)
        if self.limit is not None and self.total > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate in {operation}")
        return results


class Fit(Job):
    """Its optimizer is what torch would choose on CUDA."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=RATE, fused=self.equal, foreach=not self.equal)


@dataclass
class Outcome:
    """How windows were completed; without a model they were not."""

    model: str = ""
    micro_batch: int = 0
    batch: int = EFFECTIVE
    peak: int = 0
    note: str = ""


@functools.cache  # weights are drawn once a process
def shell(name: str) -> nn.Module:
    return without_memory(lambda: torchvision.models.get_model(name), device="meta")


def fake(name: str) -> nn.Module:
    with _disable_current_modes():
        model = copy.deepcopy(shell(name))
    return model.to_empty(device="cpu")


def millions(name: str) -> float:
    return sum(parameter.numel() for parameter in shell(name).parameters()) / 1e6 if name else 0.0


def build_trainer(
    model: nn.Module, savers: Savers, size: int, precision: str, device: str = "cpu"
) -> engine.Trainer:
    for saver, every in (("checkpointing", 1), ("checkpointing_half", 2)):
        if saver in savers:
            engine.recompute(model, engine.repeated_blocks(model), every)
    optimizer = engine.build_optimizer(model.train(), "adamw", lr=RATE, weight_decay=0.01)
    if "optimizer_on_host" in savers:
        engine.keep_state_on_host(optimizer)
    engine.allocate_state(optimizer)
    return engine.Trainer(
        model,
        optimizer,
        engine.CrossEntropy(),
        precision=engine.Precision(precision, device, cache_casts={*savers} <= {*TO_HOST[-1]}),
        micro_batch_size=size,
        max_grad_norm=MAX_NORM,
        forward=engine.offloaded(supervised, model) if "offload" in savers else supervised,
    )


def window(samples: int, pixels: int = PIXELS) -> tuple[Tensor, Tensor]:
    return Workload(nn.Identity, (samples, 3, pixels, pixels)).micro_batch()


def planner(
    build: Callable[[], nn.Module],
    precision: str,
    samples: int,
    *,
    device: Device = SIMULATED,
    pixels: int = PIXELS,
    savers: list[Savers] = COMBINATIONS,
    fixed: int | None = None,
) -> Planner:
    """Of the training of a fake model; the engine's own step is traced."""

    def measure(savers: Savers, size: int) -> Prediction:
        count = min(2 * size, samples)
        trace = trace_step(
            lambda: (build_trainer(build(), savers, size, precision), window(count, pixels)), cuda=True
        )
        return predict(trace, size, device, samples=count, savers=savers)

    usable = [one for one in savers if precision != "fp32" or "uncached_casts" not in one]
    return Planner(measure, samples, combinations=usable, fixed=fixed, rates=device.rates)


@contextmanager
def simulated(limit: int) -> Iterator[Budget]:
    budget = Budget(limit)
    with FakeTensorMode(allow_non_fake_inputs=True), flash_attention(), budget:
        yield budget


class Contender:
    """One of them, in a process of its own. taken: micro-batches of a window that are run."""

    def __init__(self, name: str, precision: str, taken: int) -> None:
        self.name, self.precision, self.taken = name, precision, taken
        self.planners: dict[str, Planner] = {}

    def completes(self, model: str, limit: int, samples: int = EFFECTIVE) -> Outcome:
        """With the largest micro-batch that does; tightfit with the one that is planned."""
        if self.name == OURS:
            if model not in self.planners:
                self.planners[model] = planner(lambda: fake(model), self.precision, samples)
            return self._attempt(self._planned, model, self.planners[model].plan(limit), samples)
        size, outcome = samples, Outcome()
        while size and not (outcome.model or outcome.note):
            outcome = self._attempt(self._by_hand, model, limit, size, samples)
            size = size // 2 if self.name != SEARCHING else 0
        return outcome

    def largest_micro_batch(self, model: str, limit: int, samples: int) -> Outcome:
        """With all savers, where the plan would take the fastest. A power of two, as for all."""
        if self.name != OURS:
            return self.completes(model, limit, samples)
        plan = planner(lambda: fake(model), self.precision, samples, savers=COMBINATIONS[-1:]).plan(limit)
        size = 2 ** (plan.best.micro_batch_size.bit_length() - 1)
        plan = replace(plan, best=replace(plan.best, micro_batch_size=size))
        return self._attempt(self._planned, model, plan, samples)

    def _attempt(self, train: Callable[..., Outcome], *arguments: Any) -> Outcome:
        try:
            return train(*arguments)
        except Exception as error:  # whatever a library cannot do here is a row of the report
            no_room = is_out_of_memory(error) or isinstance(error, engine.DoesNotFitError)
            if no_room or "No executable batch size" in str(error):  # accelerate's, at zero
                return Outcome()
            return Outcome(note=f"{type(error).__name__}: {str(error).splitlines()[0][:70]}")
        finally:
            gc.collect()

    def _by_hand(self, model: str, limit: int, size: int, samples: int) -> Outcome:
        work = Workload(lambda: fake(model), (size, 3, PIXELS, PIXELS))
        job = Fit(self.name, work, self.precision, WINDOWS, "fused" in self.name, "cpu", Turns([self.name]))
        job.accumulation, job.finds_batch_size = min(samples // size, self.taken), self.name == SEARCHING
        with simulated(limit) as budget:
            OTHERS[self.name](job)
        if job.finds_batch_size:
            size = samples = len(job.clock.batch["labels"])
        return Outcome(model, size, samples, budget.peak.total)

    def _planned(self, model: str, plan: Plan, samples: int) -> Outcome:
        if not plan.fits:
            return Outcome()
        savers, size = plan.best.savers, plan.best.micro_batch_size
        with simulated(plan.budget) as budget:
            trainer = build_trainer(fake(model), savers, size, self.precision)
            retries = take_windows(trainer, window(min(samples, self.taken * size)))
        note = f"{' '.join(savers) or 'no savers'}; time x{plan.relative_time:.2f}"
        note += f", host {budget.host_peak / MIB:,.0f} MiB, retries {retries}"
        return Outcome(model, trainer.micro_batch_size, samples, budget.peak.total, note)


def take_windows(trainer: engine.Trainer, batch: tuple[Tensor, Tensor]) -> int:
    recovery = engine.Recovery(trainer)
    for _ in range(WINDOWS):
        recovery.step(batch)
    return recovery.retries


def of_family(task: tuple[str, str, int, str, list[float]]) -> list[Outcome]:
    """The largest model within each budget, by bisection; in a fresh process."""
    name, precision, taken, family, budgets = task
    prepare_process()
    contender, found = Contender(name, precision, taken), []
    for gib in budgets:
        best, low, high = Outcome(), 0, len(FAMILIES[family])
        while low < high:
            middle = (low + high) // 2
            outcome = contender.completes(FAMILIES[family][middle], round(gib * GIB))
            best = outcome if outcome.model or not best.model else best
            low, high = (middle + 1, high) if outcome.model else (low, middle)
        found.append(best)
    return found


def of_fixed_model(who: tuple[str, str, int]) -> Outcome:
    prepare_process()
    return Contender(*who).largest_micro_batch(FIXED, round(FIXED_GIB * GIB), FIXED_WINDOW)


def prepare_process() -> None:
    """For good: CUDA's rules, silence, and modules that stay where they are, as fake ones cannot be moved."""
    warnings.simplefilter("ignore")
    contenders.quiet()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)  # several processes with threads of their own wait for each other
    install_autocast_lists()
    nn.Module.to = nn.Module.cpu = lambda module, *_, **__: module  # type: ignore[method-assign, assignment]


def exactness(precision: str, workload: str, size: int = 4) -> str:
    """On real tensors: within a budget that needs savers, and without one."""
    prepare_process()
    work = WORKLOADS[workload]
    choice = [COMBINATIONS[0], COMBINATIONS[-1]]
    build = functools.partial(without_memory, work.build)
    planned = planner(build, precision, 4 * size, pixels=64, savers=choice, fixed=size)
    needed, least = (planned.at(savers, size).required for savers in choice)
    plan = planned.plan((needed + least) // 2)
    free, _, _ = real_windows(work, (), size, None, precision)
    under, peak, retries = real_windows(work, plan.best.savers, size, plan.budget, precision)
    same = all(torch.equal(one, other) for one, other in zip(free, under, strict=True))
    numbers = f"{needed / MIB:10.1f}{plan.budget / MIB:10.1f}{peak / MIB:10.1f}{retries:9}"
    return f"{workload[:15]:20}{numbers}  {'equal' if same else 'DIFFER':8}{' '.join(plan.best.savers)}"


def real_windows(
    work: Workload, savers: Savers, size: int, limit: int | None, precision: str
) -> tuple[list[Tensor], int, int]:
    """Each window's gradients and the weights in the end; bytes at the peak, windows taken again."""
    kept: list[Tensor] = []
    with flash_attention(), Budget(limit, fake=False) as budget:
        trainer = build_trainer(work.model(), savers, size, precision)
        weights = list(trainer.model.parameters())

        def keep(*_: Any) -> None:
            with _disable_current_modes():
                kept.extend(weight.grad.clone() for weight in weights if weight.grad is not None)

        trainer.optimizer.register_step_pre_hook(keep)
        retries = take_windows(trainer, window(4 * size, 64))
    return [*kept, *weights], budget.peak.total, retries


def table(title: str, rows: dict[str, Outcome]) -> None:
    print(f"\n{title}\n{'':24}{'largest model':18}{'params M':>9}{'micro':>7}{'batch':>7}{'peak MiB':>10}")
    for name, row in rows.items():
        numbers = f"{millions(row.model):9.1f}{row.micro_batch:7}{row.batch:7}{row.peak / MIB:10,.0f}  "
        print(f"{name:24}{row.model + ' ' * (18 - len(row.model)) + numbers if row.model else ''}", end="")
        print(row.note if row.note or row.model else "none", flush=True)


def ratio(title: str, rows: dict[str, Outcome]) -> str:
    ours, base = (millions(rows[name].model) if name in rows else 0.0 for name in (OURS, BASE))
    others = (row for name, row in rows.items() if name != OURS and row.batch == EFFECTIVE)
    best = max((millions(row.model) for row in others), default=0.0)
    return (
        f"{title} x{ours / base:.2f} (x{ours / best:.2f})" if base else f"{title} {ours:.1f} M against none"
    )


def compare(arguments: argparse.Namespace) -> None:
    names, budgets, precision = arguments.contenders, arguments.budgets, arguments.precision
    who = [(name, precision, arguments.micro_batches) for name in names]
    print(f"torch {torch.__version__}, simulated device, {precision}, effective batch {EFFECTIVE}")
    ratios = []
    with multiprocessing.get_context("spawn").Pool(arguments.processes, maxtasksperchild=1) as pool:
        for family in arguments.families:
            tasks = [(*one, family, budgets) for one in who]
            found = dict(zip(names, pool.map(of_family, tasks, 1), strict=True))
            for index, gib in enumerate(budgets):
                rows = {name: outcomes[index] for name, outcomes in found.items()}
                table(f"{family} within {gib:g} GiB", rows)
                ratios.append(ratio(f"{family} {gib:g} GiB", rows))
        rows = dict(zip(names, pool.map(of_fixed_model, who, 1), strict=True))
        table(f"{FIXED} within {FIXED_GIB:g} GiB: the largest micro-batch of {FIXED_WINDOW} samples", rows)
        print(f"\nreal tensors, {precision}: gradients of {WINDOWS} windows, and weights")
        print(f"{'MiB':20}{'needed':>10}{'budget':>10}{'peak':>10}{'retries':>9}  bits    savers")
        for workload in ("resnet18 64 px x 8", "vit 64 px x 8"):
            print(pool.apply(exactness, (precision, workload)), flush=True)
    print("\nparameters of tightfit's over the textbook loop's (over the best at the same effective batch)")
    print("; ".join(ratios))


def planned_for_cuda(cap: int, precision: str) -> Plan:
    prepare_process()
    device = Device("cuda", True, 0, CUDA.workspace_bytes, CUDA.rates)  # the cap is of the allocator alone
    return planner(lambda: fake("vit_h_14"), precision, EFFECTIVE, device=device).plan(cap)


def without_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def on_cuda(cap_gib: float, precision: str) -> None:
    with multiprocessing.get_context("spawn").Pool(1, without_gpu) as pool:
        plan = pool.apply(planned_for_cuda, (round(cap_gib * GIB), precision))
    best, total = plan.best, torch.cuda.get_device_properties(0).total_memory
    print(f"vit_h_14 in {cap_gib:g} GiB: micro-batch {best.micro_batch_size}, savers {' '.join(best.savers)}")
    if not plan.fits:
        raise SystemExit(f"the plan refuses: {best.required / MIB:,.0f} MiB are required")
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gib * GIB / total))
    model = torchvision.models.get_model("vit_h_14").cuda()
    trainer = build_trainer(model, best.savers, best.micro_batch_size, precision, "cuda")
    retries = take_windows(trainer, window(EFFECTIVE))
    print(f"{WINDOWS} windows, micro-batch {trainer.micro_batch_size}, {retries} retries")
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    for what, guess, found in zip(
        ("allocated", "reserved"), (best.allocated, best.reserved), peaks, strict=True
    ):
        numbers = f"predicted {guess / MIB:,.0f} MiB, measured {found / MIB:,.0f} MiB"
        print(f"{what}: {numbers} ({guess / found - 1:+.1%})")


def main() -> None:
    names = [*OTHERS, OURS]
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
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
