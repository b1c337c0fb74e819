"""Our step against the textbook loop and the loops of libraries, interleaved.

    python benchmarks/step.py                                  # everything that is installed
    python benchmarks/step.py -w costless -p amp_bf16 -r 15

Each round runs every contender once, in a rotated order; its figure is the median over its windows, a
micro-step each, and the ratio is to the textbook loop of the same round. The table gives medians over rounds
of wall time and of the CPU time of the loop's own thread, which other processes disturb less. First table:
the same fused AdamW, clipping and scaler for all. Second (--defaults): each with its own default optimizer.
The libraries come with `pip install -e ".[peers]"`; those that are missing are left out.
"""

import argparse
import contextlib
import csv
import io
import os
import platform
import statistics
import sys
from pathlib import Path

os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from contenders import ACCUMULATION, CONTENDERS, DTYPES, Job, quiet
from workloads import WORKLOADS

WARM_UP = 2  # windows
FEWEST = 4  # windows that count


def main() -> None:
    arguments = parse()
    quiet()
    torch.set_num_threads(arguments.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else processor()
    print(f"{where}, torch {torch.__version__}, {arguments.threads} thread(s); {ACCUMULATION} micro-batches")
    rows = []
    for workload in arguments.workloads:
        for precision in arguments.precisions:
            for equal in (True, False) if arguments.defaults else (True,):
                rows += compare(workload, precision, equal, device, arguments)
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def compare(
    workload: str, precision: str, equal: bool, device: str, arguments: argparse.Namespace
) -> list[dict[str, object]]:
    """One table: all contenders on one workload. Returns its rows."""
    names = ["textbook loop", *(name for name in arguments.contenders if name != "textbook loop")]
    windows = calibrate(workload, precision, equal, device, arguments.seconds)
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    missing: dict[str, str] = {}
    for turn in range(arguments.rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            if name in missing:
                continue
            try:
                figures[name].append(block(name, Job(WORKLOADS[workload], precision, windows, equal, device)))
            except Exception as error:  # whatever a library cannot do here is a row of the report
                missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    print(
        f"\n{workload}, {precision}, {'the same fused AdamW' if equal else 'own defaults'}, {windows} windows"
    )
    print(f"{'':22}{'wall us':>10}{'ratio':>8}{'cpu us':>10}{'ratio':>8}{'[min':>8}{'max]':>8}{'over us':>9}")
    rows = []
    for name in names:
        if name in missing:
            print(f"{name:22}{missing[name]}")
            continue
        rows.append(row(name, figures[name], figures["textbook loop"]))
        values = [
            f"{value:10.1f}" if "us" in key else f"{value:8.3f}"
            for key, value in rows[-1].items()
            if key != "contender"
        ]
        print(f"{name:22}" + "".join(values))
    setting = {"workload": workload, "precision": precision, "optimizer": "fused" if equal else "default"}
    return [setting | row for row in rows]


def row(
    name: str, figures: list[tuple[float, float]], textbook: list[tuple[float, float]]
) -> dict[str, object]:
    """Medians over rounds; ratios and the difference are of the same round."""
    wall, cpu = zip(*figures, strict=True)
    wall_ratios = [a[0] / b[0] for a, b in zip(figures, textbook, strict=False)]
    cpu_ratios = [a[1] / b[1] for a, b in zip(figures, textbook, strict=False)]
    over = [a[1] - b[1] for a, b in zip(figures, textbook, strict=False)]
    return {
        "contender": name,
        "wall_us": statistics.median(wall),
        "wall_ratio": statistics.median(wall_ratios),
        "cpu_us": statistics.median(cpu),
        "cpu_ratio": statistics.median(cpu_ratios),
        "cpu_ratio_min": min(cpu_ratios),
        "cpu_ratio_max": max(cpu_ratios),
        "over_us": statistics.median(over),
    }


def block(name: str, job: Job) -> tuple[float, float]:
    """Median microseconds of a micro-step, of wall time and of this thread's CPU time."""
    with contextlib.redirect_stdout(io.StringIO()):
        CONTENDERS[name](job)
    each = job.windows / len(job.clock.wall)  # windows between two stamps
    stride = round(1 / each)
    return tuple(
        statistics.median(
            (stamps[i + stride] - stamps[i]) / ACCUMULATION * 1e6
            for i in range(WARM_UP * stride, len(stamps) - stride, stride)
        )
        for stamps in (job.clock.wall, job.clock.cpu)
    )  # type: ignore[return-value]


def calibrate(workload: str, precision: str, equal: bool, device: str, seconds: float) -> int:
    """Windows that take the textbook loop about `seconds`."""
    fewest = WARM_UP + FEWEST + 1
    job = Job(WORKLOADS[workload], precision, fewest, equal, device)
    block("textbook loop", job)  # imports and kernels
    microseconds, _ = block("textbook loop", job)
    return max(fewest, round(seconds * 1e6 / (microseconds * ACCUMULATION)))


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{names[0] if names else platform.machine()}, {len(names)} cores ({capability})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-w", "--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("-p", "--precisions", nargs="+", choices=DTYPES, default=["fp32", "amp_bf16"])
    parser.add_argument("-c", "--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("-r", "--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one contender in one round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--defaults", action="store_true", help="also each with its own default optimizer")
    parser.add_argument("--csv", help="write the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
