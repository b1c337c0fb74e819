import subprocess
from pathlib import Path

import pytest

from pipeline import config, provenance


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    text = Path("params.yaml").read_text()
    for name in ("DVC_EXP_BASELINE_REV", "DVC_EXP_NAME", "DVC_STAGE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(text)
    (tmp_path / "dvc.lock").write_text("a")
    for command in ("init --quiet", "add -A", "-c user.name=a -c user.email=a@b commit --quiet -m first"):
        subprocess.run(["git", *command.split()], check=True)
    return tmp_path


def test_a_clean_tree_has_a_commit_and_no_diff(repository: Path) -> None:
    (repository / "dvc.lock").write_text("every reproduction rewrites it")
    source = provenance.source(config.load())
    assert len(source.commit) == 40
    assert (source.dirty, source.diff, source.overrides) == (False, "", "none")


def test_what_was_changed_is_in_the_diff_and_in_the_overrides(repository: Path) -> None:
    text = (repository / "params.yaml").read_text().replace("lr: 0.005", "lr: 1e-4")
    (repository / "params.yaml").write_text(text)
    (repository / "mine.py").touch()
    source = provenance.source(config.load())
    assert source.dirty
    assert source.overrides == "optimizer.lr=0.0001"
    assert "+  lr: 1e-4" in source.diff
    assert "?? mine.py" in source.diff


def test_outside_git_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = config.load()
    monkeypatch.delenv("DVC_EXP_BASELINE_REV", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    source = provenance.source(params)
    assert (source.commit, source.dirty) == ("none", False)
    assert source.overrides.startswith("unknown")


def test_the_package_list_is_pinned_lines() -> None:
    lines = provenance.packages().splitlines()
    assert any(line.startswith("torch==") for line in lines)
    assert lines == sorted(lines, key=lambda line: line.split("==")[0].lower())
