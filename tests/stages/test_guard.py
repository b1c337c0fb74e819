from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.stages import guard

DVC = """
stages:
  train:
    deps: [code.py, data, listed.py]
    params: [optimizer]
  evaluate:
    deps: [code.py]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "dvc.yaml").write_text(DVC)
    (tmp_path / "params.yaml").write_text("optimizer:\n  lr: 1\ntracking:\n  name: a\n")
    for name in ("code.py", "listed.py", "unlisted.py"):
        (tmp_path / name).write_text("x = 1\n")
    return tmp_path


def test_unchanged_inputs_pass(folder: Path) -> None:
    with guard.inputs_unchanged("train"):
        (folder / "params.yaml").write_text("optimizer:\n  lr: 1\ntracking:\n  name: b\n")
    with guard.inputs_unchanged("train"):
        (folder / "unlisted.py").write_text("x = 2\n")
    assert "unlisted.py" not in guard.code_digests("train")


def test_a_param_or_code_that_changed_meanwhile_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"optimizer\.lr: 1 -> 2"), guard.inputs_unchanged("train"):
        (folder / "params.yaml").write_text("optimizer:\n  lr: 2\n")
    with pytest.raises(UserError, match=r": code\.py\. Run it again"), guard.inputs_unchanged("train"):
        (folder / "code.py").write_text("x = 3\n")


@pytest.mark.usefixtures("folder")
def test_own_files_must_be_dependencies_under_dvc(monkeypatch: pytest.MonkeyPatch) -> None:
    guard.check_dependency(("train",), "model.name", "unlisted:f")
    monkeypatch.setenv("DVC_STAGE", "train")
    guard.check_dependency(("train",), "model.name", "listed:f")
    guard.check_dependency(("train",), "model.name", "json:loads")
    guard.check_dependency(("train",), "model.name", "small_cnn")
    with pytest.raises(UserError, match=r"(?s)unlisted\.py.*deps of train:\n      - unlisted\.py"):
        guard.check_dependency(("train",), "model.name", "unlisted:f")
    with pytest.raises(UserError, match=r"deps of evaluate:"):
        guard.check_dependency(("train", "evaluate"), "model.name", "listed:f")


def test_a_file_inside_a_listed_folder_is_a_dependency(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_STAGE", "train")
    (folder / "data").mkdir()
    (folder / "data" / "weights.pth").touch()
    guard.check_dependency(("train",), "model.weights", "data/weights.pth")
    with pytest.raises(UserError, match="deps of evaluate"):
        guard.check_dependency(("evaluate",), "model.weights", "data/weights.pth")


def test_a_users_mistake_is_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def mistaken(params: object) -> None:
        raise UserError("put it right")

    assert guard.run_stage("train", mistaken) == 2
    assert capsys.readouterr().err == "train: put it right\n"
