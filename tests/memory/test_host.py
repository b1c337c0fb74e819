"""The allocator setting keeps what a step frees, so that the next one takes no new pages."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, statistics, sys, torch
from pipeline.memory.host import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(50_000_000).sum()  # 200 MB: past glibc's largest dynamic threshold
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# where small blocks come to lie is chance: the heap grows now and then before it has what is needed
print(int(statistics.median([faults() for _ in range(40)][20:])))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    faults = {
        mode: int(
            subprocess.run(
                [sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True, timeout=60
            ).stdout
        )
        for mode in ("default", "keep")
    }
    assert faults["keep"] < faults["default"] / 10
