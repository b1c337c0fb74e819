"""benchmarks/faults.py, of which the README's table is, in a short form."""

import os
import subprocess
import sys

import pytest
from project import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_benchmark_of_faults_in_its_short_form() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/faults.py", "--kills", "3", "kills", "signals"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "3 of 3: weights bit for bit" in done.stdout
    assert done.stdout.count("continued: weights and history equal, FINISHED") == 2
