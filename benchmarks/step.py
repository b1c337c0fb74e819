"""Our step against the textbook loop and the loops of libraries, in turns of a few windows.

    python benchmarks/step.py                                  # everything that is installed
    python benchmarks/step.py -w costless -p amp_bf16 --seconds 10

Every contender has a thread of its own and trains for a tenth of a second when its turn comes (one window at
least), so that all meet the machine in the same state, however noisy it is. A ratio is to the textbook loop
in the same round of turns; the table gives medians over rounds, of wall time and of the CPU time of the
contender's own thread, of a micro-step. First table: the same fused AdamW, clipping and scaler for all.
Second (--defaults): each with its own default optimizer. The libraries come with
`pip install -e ".[peers]"`; what is missing is left out.
"""

import argparse
import contextlib
import csv
import ctypes
import io
import os
import platform
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from contenders import ACCUMULATION, CONTENDERS, DTYPES, Job, Turns, quiet
from workloads import WORKLOADS

from pipeline.memory.host import keep_freed_memory

M_ARENA_MAX = -8  # mallopt(3)
WARM_UP = 2  # turns
FEWEST = 10  # turns that count
TURN_SECONDS = 0.1
BASE = "textbook loop"


def main() -> None:
    arguments = parse()
    quiet()
    share_one_allocator()
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


def share_one_allocator() -> None:
    """One arena of glibc for all threads, keeping what is freed: else luck decides who pays page faults."""
    if keep_freed_memory():
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def compare(
    workload: str, precision: str, equal: bool, device: str, arguments: argparse.Namespace
) -> list[dict[str, object]]:
    """One table: all contenders on one workload. Returns its rows."""
    names = [BASE, *(name for name in arguments.contenders if name != BASE)]

    def jobs(names: list[str], turns: int, windows: int) -> list[Job]:
        order = Turns(names, windows)
        count = turns * windows
        return [Job(name, WORKLOADS[workload], precision, count, equal, device, order) for name in names]

    first: dict[str, Any] = {}
    for name in names:  # one after the other: imports, kernels; who can do this at all
        first |= run(jobs([name], WARM_UP + 1, 1))
    able = [name for name in names if not isinstance(first[name], str)]
    window = first[BASE].clock.wall[-1]
    windows = max(1, round(TURN_SECONDS / window))
    turns = WARM_UP + max(FEWEST, round(arguments.seconds / (window * windows)))
    done = run(jobs(able, turns, windows))
    print(f"\n{workload}, {precision}, {'the same fused AdamW' if equal else 'own defaults'}, ", end="")
    print(f"{turns - WARM_UP} turns of {windows} windows")
    print(f"{'':22}{'wall us':>10}{'ratio':>8}{'cpu us':>10}{'ratio':>8}{'quartiles':>15}{'over us':>9}")
    rows = []
    for name in names:
        outcome = done.get(name, first[name])
        if isinstance(outcome, str):
            print(f"{name:22}{outcome}")
            continue
        rows.append(row(name, done[name], done[BASE], windows * ACCUMULATION))
        r = rows[-1]
        print(
            f"{name:22}{r['wall_us']:10.1f}{r['wall_ratio']:8.3f}{r['cpu_us']:10.1f}{r['cpu_ratio']:8.3f}",
            end="",
        )
        print(f"{r['cpu_ratio_q1']:8.3f}{r['cpu_ratio_q3']:7.3f}{r['over_us']:9.1f}")
    setting = {"workload": workload, "precision": precision, "optimizer": "fused" if equal else "default"}
    return [setting | row for row in rows]


def run(jobs: list[Job]) -> dict[str, Any]:
    """Runs the jobs in turn; gives each back, or what it could not do."""
    results: dict[str, Job | str] = {}

    def work(job: Job) -> None:
        try:
            CONTENDERS[job.name](job)
            results[job.name] = job
        except Exception as error:  # whatever a library cannot do here is a row of the report
            results[job.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
        finally:
            job.turns.leave(job.name)

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    with contextlib.redirect_stdout(io.StringIO()):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def row(name: str, job: Job, base: Job, micro_steps: int) -> dict[str, object]:
    """Medians over turns, in microseconds of a micro-step; some loops leave the last turn unfinished."""
    wall, cpu, base_wall, base_cpu = (
        [seconds / micro_steps * 1e6 for seconds in times[WARM_UP:]]
        for times in (job.clock.wall, job.clock.cpu, base.clock.wall, base.clock.cpu)
    )
    ratios = [mine / other for mine, other in zip(cpu, base_cpu, strict=False)]
    first, _, third = statistics.quantiles(ratios, n=4)
    return {
        "contender": name,
        "wall_us": statistics.median(wall),
        "wall_ratio": statistics.median(a / b for a, b in zip(wall, base_wall, strict=False)),
        "cpu_us": statistics.median(cpu),
        "cpu_ratio": statistics.median(ratios),
        "cpu_ratio_q1": first,
        "cpu_ratio_q3": third,
        "over_us": statistics.median(a - b for a, b in zip(cpu, base_cpu, strict=False)),
    }


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
    parser.add_argument("--seconds", type=float, default=20.0, help="of each contender in one table")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--defaults", action="store_true", help="also each with its own default optimizer")
    parser.add_argument("--csv", help="write the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
