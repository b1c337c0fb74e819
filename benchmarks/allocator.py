"""What keeping freed memory does to training on a CPU: child processes in turn, with and without.

    python benchmarks/allocator.py

Prints milliseconds and page faults of a window (64 samples as 4 micro-batches), and the peak resident set.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MODELS = ("small_cnn", "resnet18")
PRECISIONS = ("fp32", "amp_bf16")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    print(f"{'':22}{'ms':>9}{'kept ms':>9}{'ratio':>8}{'faults':>9}{'kept':>7}{'MiB':>7}{'kept':>7}")
    for model in arguments.models:
        for precision in arguments.precisions:
            rounds = [
                [measured(model, precision, mode) for mode in ("default", "keep")]
                for _ in range(arguments.rounds)
            ]
            (ms, faults, mib), (kept_ms, kept_faults, kept_mib) = (
                [statistics.median(values) for values in zip(*mode, strict=True)]
                for mode in zip(*rounds, strict=True)
            )
            ratio = statistics.median(kept[0] / default[0] for default, kept in rounds)
            print(f"{model:12}{precision:10}{ms:9.1f}{kept_ms:9.1f}{ratio:8.3f}", end="")
            print(f"{faults:9.0f}{kept_faults:7.0f}{mib:7.0f}{kept_mib:7.0f}", flush=True)


def measured(model: str, precision: str, mode: str) -> list[float]:
    command = [sys.executable, __file__, "--child", model, precision, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(value) for value in done.stdout.split()]


def child(name: str, precision: str, mode: str) -> None:
    import torch
    from workloads import WORKLOADS

    from pipeline.engine import CrossEntropy, Precision, Trainer, build_optimizer
    from pipeline.memory.host import keep_freed_memory

    if mode == "keep" and not keep_freed_memory():
        sys.exit("not possible here: glibc is needed")
    workload = WORKLOADS["small_cnn 32 px x 16" if name == "small_cnn" else "resnet18 64 px x 8"]
    model = workload.model()
    optimizer = build_optimizer(model, "adamw", lr=1e-4)
    inputs, targets = workload.micro_batch()
    window = torch.cat([inputs] * 4), torch.cat([targets] * 4)
    trainer = Trainer(
        model, optimizer, CrossEntropy(), precision=Precision(precision), micro_batch_size=len(targets)
    )
    seconds = []
    for step in range(16):
        if step == 6:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        started = time.perf_counter()
        trainer.step(window)
        seconds.append(time.perf_counter() - started)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(statistics.median(seconds[6:]) * 1e3, (usage.ru_minflt - before) / 10, usage.ru_maxrss / 1024)


if __name__ == "__main__":
    main()
