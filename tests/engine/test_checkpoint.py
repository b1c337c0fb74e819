"""A checkpoint is whole or not there, and anything else in its place is known as such."""

import hashlib
import os
import pickle
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile import Touch, no_file_over

from pipeline.engine import Checkpoints, DamagedError
from pipeline.engine import checkpoint as checkpoints

CONTENT = {"weights": torch.arange(5000.0), "step": 3, "lists": [(1, 2.5), None, "text"]}
NAME = "step-00000003.checkpoint"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    checkpoints.write(tmp_path / NAME, CONTENT)
    return tmp_path / NAME


def test_what_was_written_is_read_and_torch_opens_it_too(path: Path) -> None:
    for content in (checkpoints.read(path), torch.load(path, weights_only=True)):
        assert torch.equal(content["weights"], CONTENT["weights"])
        assert (content["step"], content["lists"]) == (3, [(1, 2.5), None, "text"])
    assert os.listdir(path.parent) == [NAME]


@pytest.mark.parametrize("place", ["header", "tensor data", "directory", "digest", "magic"])
def test_a_flipped_bit_is_detected_wherever_it_is(path: Path, place: str) -> None:
    data = bytearray(path.read_bytes())
    positions = {
        "header": 5,
        "tensor data": len(data) // 2,
        "directory": len(data) - checkpoints.TAIL - 10,
        "digest": len(data) - checkpoints.TAIL + 3,
        "magic": len(data) - 3,
    }
    for bit in (0, 7):
        flipped = bytearray(data)
        flipped[positions[place]] ^= 1 << bit
        path.write_bytes(flipped)
        with pytest.raises(DamagedError):
            checkpoints.read(path)


def test_every_position_is_covered_by_the_digest(tmp_path: Path) -> None:
    """A small one, each byte of it."""
    path = tmp_path / NAME
    checkpoints.write(path, {"a": 1})
    data = path.read_bytes()
    for position in range(0, len(data), 7):
        path.write_bytes(data[:position] + bytes([data[position] ^ 16]) + data[position + 1 :])
        with pytest.raises(DamagedError):
            checkpoints.read(path)


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, -1])
def test_a_cut_or_empty_file_is_refused(path: Path, kept: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept) if kept == 0.5 else int(kept)])
    with pytest.raises(DamagedError, match=r"cut off|SHA-256"):
        checkpoints.read(path)


def test_a_foreign_file_a_folder_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / NAME
    foreign.write_bytes(b"\x89PNG" + os.urandom(5000))
    with pytest.raises(DamagedError, match="another kind of file"):
        checkpoints.read(foreign)
    torch.save(CONTENT, foreign)
    with pytest.raises(DamagedError, match="another kind of file"):
        checkpoints.read(foreign)
    (tmp_path / "folder").mkdir()
    for other in (tmp_path / "folder", tmp_path / "missing"):
        with pytest.raises(DamagedError, match="cannot be read"):
            checkpoints.read(other)


def test_a_hostile_checkpoint_runs_no_code_though_its_digest_is_right(tmp_path: Path) -> None:
    target, path = tmp_path / "was here", tmp_path / NAME
    torch.save({"step": Touch(target)}, path)
    data = path.read_bytes()
    path.write_bytes(data + hashlib.sha256(data).digest() + checkpoints.MAGIC)
    with pytest.raises(DamagedError, match="more than tensors"):
        checkpoints.read(path)
    path.write_bytes(pickle.dumps(Touch(target)) * 50)
    with pytest.raises(DamagedError):
        checkpoints.read(path)
    assert not target.exists()


def test_what_could_not_be_read_without_running_code_is_not_written(tmp_path: Path) -> None:
    """torch.__version__ looks like a text and is none."""
    for value in (torch.__version__, Touch(tmp_path), {1, 2}, np.float64(1.0)):
        with pytest.raises(TypeError, match=re.escape("content['how'][0] is a")):
            checkpoints.write(tmp_path / NAME, {"how": [value]})
    assert list(tmp_path.iterdir()) == []


def test_the_newest_are_kept_and_a_damaged_one_is_told_before_the_one_before_it(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=2)
    for step in (9, 10, 100):
        kept.save({"step": step}, step)
    assert [checkpoints.step_of(path) for path in kept.paths()] == [100, 10]
    kept.paths()[0].write_bytes(b"x" * 1000)
    (_, damaged), (_, good) = kept.newest()
    assert isinstance(damaged, DamagedError)
    assert good == {"step": 10}
    kept.remove_all()
    assert kept.paths() == []


def test_in_the_background_the_state_of_that_moment_is_written(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, background=True)
    weights = torch.zeros(1_000_000)
    kept.save({"weights": weights}, 1)
    weights += 1
    kept.wait()
    assert checkpoints.read(kept.paths()[0])["weights"].sum() == 0


@pytest.mark.parametrize("background", [False, True])
def test_a_write_that_fails_leaves_the_last_good_one_and_says_so(tmp_path: Path, background: bool) -> None:
    """A real limit on the size of a file, as a quota would be (EFBIG)."""
    kept = Checkpoints(tmp_path, background=background)
    kept.save({"step": 1}, 1)
    kept.wait()
    with no_file_over(100_000), pytest.raises(OSError, match="File too large"):
        kept.save({"weights": torch.zeros(1_000_000)}, 2)
        kept.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.checkpoint"]
    kept.save({"step": 3}, 3)
    kept.wait()
    assert len(kept.paths()) == 2


WRITER = """
    import sys
    from pathlib import Path
    import torch
    from pipeline.engine import Checkpoints
    kept = Checkpoints(Path(sys.argv[1]), keep=2)
    weights = torch.zeros(2_000_000)
    for step in range(1, 10_000):
        kept.save({"weights": weights.fill_(step), "step": step}, step)
        print(step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_sigkill_at_any_moment_of_a_write_leaves_whole_checkpoints(tmp_path: Path) -> None:
    for trial in range(6):
        folder = tmp_path / str(trial)
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        last = 0
        for line in process.stdout:
            last = int(line)
            if last == 3:
                break
        time.sleep(0.004 * trial)
        process.kill()
        rest = process.communicate(timeout=30)[0].split()
        last = max([last, *map(int, rest)])
        kept = Checkpoints(folder)
        newest = list(kept.newest())
        assert [isinstance(content, DamagedError) for _, content in newest] == [False] * len(newest)
        step = newest[0][1]["step"]
        assert step in (last, last + 1)
        assert newest[0][1]["weights"].unique().tolist() == [step]
        kept.remove_temporary()
        assert all(path.name.startswith("step-") for path in folder.iterdir())
