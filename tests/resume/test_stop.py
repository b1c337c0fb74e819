"""Signals, in real processes."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

LOOP = """
    import sys, time
    from pipeline.errors import Stopped
    from pipeline.resume.stop import Stop
    with Stop() as stop:
        try:
            print("ready", flush=True)
            for window in range(1000):
                time.sleep(0.02)
                if sys.argv[1] == "checks":
                    stop.check()
        except Stopped as error:
            print("saved", flush=True)
            time.sleep(float(sys.argv[2]))
            sys.exit(128 + error.number)
"""
CHILD = """
    import time
    from pipeline.resume.stop import die_with_parent
    die_with_parent()
    print("ready", flush=True)
    time.sleep(30)
"""
PARENT = """
    import subprocess, sys, time
    process = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    print(process.pid, flush=True)
    time.sleep(60)
"""


def started(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_waits_for_the_window_and_the_rest_of_the_same_request_is_nothing(
    number: signal.Signals, code: int
) -> None:
    process = started(LOOP, "checks", "0.5")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)  # as the kernel does when a parent dies of the first
    said, errors = process.communicate(timeout=20)
    assert said == "saved\n"
    assert process.returncode == code
    assert "once more to stop at once" in errors


def test_a_second_signal_ends_it_at_once() -> None:
    process = started(LOOP, "never checks", "0")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    time.sleep(2.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=5)
    assert (said, process.returncode) == ("", 143)
    assert "the last saved state stays" in errors


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_a_stage_ends_when_its_parent_is_killed() -> None:
    parent = started(PARENT, textwrap.dedent(CHILD))
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate(timeout=10)
    until = time.monotonic() + 5
    while _runs(child):
        assert time.monotonic() < until
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().split(")")[1].split()[0] != "Z"
    except OSError:
        return False
