import re
from pathlib import Path

import pytest
from hostile import no_file_over

from pipeline import files
from pipeline.errors import UserError


def test_an_output_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.txt"
    files.write_text(path, "first")
    with pytest.raises(RuntimeError), files.whole(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "first"
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for name in ("old", "new"):
        with files.whole(folder) as temporary:
            temporary.mkdir()
            (temporary / name).touch()
    assert [path.name for path in folder.iterdir()] == ["new"]
    with pytest.raises(KeyboardInterrupt), files.whole(folder) as temporary:
        temporary.mkdir()
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_link_is_replaced_and_what_it_points_to_is_not_written(tmp_path: Path) -> None:
    """DVC may have put a link into its cache there."""
    (tmp_path / "cache").write_text("kept")
    (tmp_path / "out").symlink_to(tmp_path / "cache")
    files.write_text(tmp_path / "out", "new")
    assert ((tmp_path / "cache").read_text(), (tmp_path / "out").read_text()) == ("kept", "new")


def test_json_has_one_form_and_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"b": 1, "a": [2]})
    first = path.read_bytes()
    files.write_json(path, {"a": [2], "b": 1})
    assert path.read_bytes() == first
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(path, {"a": float("nan")})
    assert path.read_bytes() == first


@pytest.mark.parametrize("content", [None, "{", "[" * 100_000, "[]", "{}", '{"a": "one"}'])
def test_a_missing_or_broken_json_names_the_command_that_makes_it(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"a\.json.*run `dvc repro x`"):
        files.read_json(path, "dvc repro x", {"a": int})


def test_a_full_disk_leaves_what_was_there_and_says_path_and_need(tmp_path: Path) -> None:
    path = tmp_path / "out"
    files.write_text(path, "first")
    message = r"File too large \([\d.,]+ MiB free, 2\.0 MiB needed\)"
    with (
        no_file_over(1000),
        pytest.raises(OSError, match=message),
        files.whole(path, 2 * 1024**2) as temporary,
    ):
        temporary.write_bytes(bytes(2000))
    with no_file_over(1000), pytest.raises(OSError, match=re.escape(str(path))):
        files.write_text(path, "x" * 2000)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("out", "first")]


def test_an_error_of_what_is_read_meanwhile_is_not_blamed_on_the_output(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="source"), files.whole(tmp_path / "out"):
        (tmp_path / "source").read_text()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    files.check_writable(tmp_path / "new" / "folder")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=str(tmp_path / "file")):
        files.check_writable(tmp_path / "file")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
