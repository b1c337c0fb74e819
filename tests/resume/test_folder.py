"""One process in a training's folder at a time; a lock that nobody holds means nothing."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.resume.folder import folders, holder, note_on_others, read_status, training_folder

INPUTS = {"data": {"a": "1"}, "code": {}, "what": {"train.epochs": 3}}
OTHER = {"data": {"a": "2"}, "code": {}, "what": {"train.epochs": 3}}
HOLDS = """
    import os, sys, time
    from pathlib import Path
    from pipeline.resume.folder import training_folder
    inputs = {"data": {"a": "1"}, "code": {}, "what": {"train.epochs": 3}}
    with training_folder(Path(sys.argv[1]), inputs) as folder:
        folder.begin("name", 10, folder.status.inputs)
        child = os.fork()  # as a loader process: it lives on when its parent is killed
        if child == 0:
            time.sleep(20)
            os._exit(0)
        print(child, flush=True)
        time.sleep(60)
"""


def test_a_second_training_is_refused_with_the_pid_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDS), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        with (
            pytest.raises(UserError, match=f"running already, as process {process.pid}"),
            training_folder(tmp_path, INPUTS),
        ):
            pass
        with training_folder(tmp_path, OTHER):
            pass
        process.kill()
        process.wait(timeout=10)
        with training_folder(tmp_path, INPUTS) as folder:
            assert folder.status.state == "unfinished"
            assert folder.status.total_steps == 10
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)


def test_who_holds_it_is_told_and_others_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDS), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        (path,) = folders(tmp_path)
        assert holder(path) == process.pid
        note_on_others(tmp_path, tmp_path / "own", "cpu")
        assert f"1 other training of this project runs now (process {process.pid})" in capsys.readouterr().out
    finally:
        process.kill()
        process.wait(timeout=10)
        os.kill(child, signal.SIGKILL)
    assert holder(path) is None
    note_on_others(tmp_path, tmp_path / "own", "cpu")
    assert capsys.readouterr().out == ""


def test_a_training_from_begin_to_finish(tmp_path: Path) -> None:
    with training_folder(tmp_path, INPUTS) as folder:
        assert folder.status.state == "new"
        folder.begin("a", 10, INPUTS)
        kept = folder.checkpoints(keep=3)
        for step in (1, 2, 3):
            kept.save({"step": step}, step)
        (folder.path / ".step-00000004.checkpoint.1.tmp").write_text("half")
    with training_folder(tmp_path, INPUTS) as folder:
        assert not list(folder.path.glob(".*.tmp"))
        folder.go_on(10)
        assert folder.status.resumes == 1
        journal = folder.journal
        folder.finish(1)
        assert len(kept.paths()) == 1
    status = read_status(folder.path)
    assert status is not None
    assert (status.state, status.inputs) == ("finished", INPUTS)
    with training_folder(tmp_path, INPUTS) as folder:
        folder.begin("b", 10, INPUTS)
        assert kept.paths() == []
        assert folder.status.resumes == 0
        assert folder.journal.parent == journal.parent


def test_a_root_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"set another checkpoint\.folder"),
        training_folder(tmp_path / "file", INPUTS),
    ):
        pass


def test_a_damaged_status_is_a_new_training(tmp_path: Path) -> None:
    with training_folder(tmp_path, INPUTS) as folder:
        folder.begin("a", 10, INPUTS)
        (folder.path / "training.json").write_text('{"state": 3')
    with training_folder(tmp_path, INPUTS) as folder:
        assert folder.status.state == "new"
