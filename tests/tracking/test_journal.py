"""What is written down stands: after a kill, a power loss, and when steps are taken again."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pipeline.tracking import Journal, waiting_events
from pipeline.tracking.journal import EVENTS, journals, read_delivered, read_events, write_delivered


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.create(tmp_path / "a", name="vit 1", experiment="tests")


def events(folder: Path) -> list[dict[str, Any]]:
    return [event for event, _ in read_events(folder / EVENTS)]


def kinds(folder: Path) -> list[str]:
    return [event["kind"] for event in events(folder)]


def spoil(folder: Path, text: bytes) -> None:
    """Adds bytes as no `append` writes them."""
    with (folder / EVENTS).open("ab") as file:
        file.write(text)


@pytest.mark.parametrize(
    "torn",
    [b'{"kind": "descr', b'{"kind": "describe", "text": "late"}', b"\0" * 40, b'{"ki\n', b"\0\0\n{}{\n\0"],
)
def test_a_torn_last_line_is_cut_when_opened_again_and_append_goes_on(journal: Journal, torn: bytes) -> None:
    journal.append("describe", text="first")
    whole = journal.position
    journal.close()
    spoil(journal.folder, torn)
    again = Journal(journal.folder)
    assert (again.description, again.position) == ("first", whole)
    again.append("describe", text="second")
    assert kinds(journal.folder) == ["run", "describe", "describe"]
    assert Journal(journal.folder).description == "second"


def test_a_line_that_is_being_written_is_not_read_yet(journal: Journal) -> None:
    spoil(journal.folder, b'{"kind": "describe", "text": "ha')
    assert kinds(journal.folder) == ["run"]
    spoil(journal.folder, b'lf"}\n')
    assert kinds(journal.folder) == ["run", "describe"]


@pytest.mark.parametrize("garbage", [b"\0\0\0\0\n", b"\xff\xfe{\n", b'{"kind": \n', b"\n"])
def test_a_garbage_line_in_the_middle_is_passed_over(journal: Journal, garbage: bytes) -> None:
    journal.metrics({"loss": 2.0}, 1, row=True)
    spoil(journal.folder, garbage)
    journal.metrics({"loss": 1.0}, 2, row=True)
    again = Journal(journal.folder)
    assert again.rows == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    assert waiting_events(journal.folder) == 3
    last = list(read_events(journal.folder / EVENTS))[-1][1]
    assert last == again.position  # positions count the garbage too


def test_an_empty_file_and_one_of_garbage_are_a_journal_without_a_run(tmp_path: Path) -> None:
    for content in (b"", b"\0\0\0", b"garbage\nmore\n"):
        (tmp_path / EVENTS).write_bytes(content)
        journal = Journal(tmp_path)
        assert (journal.begun, journal.rows, journal.position) == ({}, [], 0)


def test_rows_merge_by_step_in_the_order_of_steps(journal: Journal) -> None:
    journal.metrics({"loss": 3.0}, 20, row=True)
    journal.metrics({"loss": 4.0}, 10, row=True)
    journal.metrics({"accuracy": 0.5}, 20, row=True)
    assert journal.rows == [{"step": 10, "loss": 4.0}, {"step": 20, "loss": 3.0, "accuracy": 0.5}]


def test_what_is_no_row_stands_but_is_not_in_the_table(journal: Journal) -> None:
    journal.metrics({"test/accuracy": 0.5}, 7)
    assert journal.rows == []
    assert journal.stands_at(7)
    assert not journal.stands_at(8)


def test_what_stands_at_a_step_is_not_written_again(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    journal.metrics({"loss": 2.0}, 1, row=True)
    monkeypatch.setattr("time.time", lambda: 2000.0)
    for one in (journal, Journal(journal.folder)):  # also after a restart
        size = one.position
        one.metrics({"loss": 9.0}, 1, row=True)
        assert one.position == size
        assert one.rows == [{"step": 1, "loss": 2.0}]
    stands = [(event["time"], event["values"]) for event in events(journal.folder)[1:]]
    assert stands == [(1_000_000, {"loss": 2.0})]


def test_of_a_row_taken_again_only_what_is_new_is_written(journal: Journal) -> None:
    journal.metrics({"loss": 2.0}, 1, row=True)
    journal.metrics({"loss": 9.0, "accuracy": 0.5}, 1, row=True)
    assert events(journal.folder)[-1]["values"] == {"accuracy": 0.5}
    assert journal.rows == [{"step": 1, "loss": 2.0, "accuracy": 0.5}]


def test_a_key_at_another_step_is_another_value(journal: Journal) -> None:
    journal.metrics({"loss": 2.0}, 1, row=True)
    journal.metrics({"loss": 2.0}, 2, row=True)
    assert len(journal.rows) == 2


def test_system_metrics_are_written_every_time(journal: Journal) -> None:
    for used in (10.0, 20.0):
        journal.metrics({"system/cpu": used}, 1)
    assert [event["values"]["system/cpu"] for event in events(journal.folder)[1:]] == [10.0, 20.0]


def test_what_is_not_finite_is_left_out(journal: Journal) -> None:
    journal.metrics({"loss": math.nan, "norm": math.inf, "low": -math.inf, "accuracy": 0.5}, 1, row=True)
    assert journal.rows == [{"step": 1, "accuracy": 0.5}]
    assert events(journal.folder)[-1]["values"] == {"accuracy": 0.5}
    size = journal.position
    journal.metrics({"loss": math.nan}, 2, row=True)
    assert journal.position == size
    assert not journal.stands_at(2)


def test_a_value_that_was_not_finite_may_come_later(journal: Journal) -> None:
    journal.metrics({"loss": math.nan}, 1, row=True)
    journal.metrics({"loss": 2.0}, 1, row=True)
    assert journal.rows == [{"step": 1, "loss": 2.0}]


def test_opened_again_it_is_as_it_was(journal: Journal) -> None:
    journal.metrics({"loss": 2.0}, 2, row=True)
    journal.metrics({"loss": 3.0}, 1, row=True)
    journal.append("describe", text="early")
    journal.append("describe", text="late")
    journal.append("status", status="RUNNING")
    journal.append("model", path="files/x/model")
    journal.append("status", status="KILLED")
    again = Journal(journal.folder)
    for name in ("rows", "description", "status", "has_model", "begun", "position", "run_id"):
        assert getattr(again, name) == getattr(journal, name), name
    assert again.rows == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}]
    assert (again.description, again.status, again.has_model) == ("late", "KILLED", True)


def test_a_new_one_has_no_description_status_or_model(journal: Journal) -> None:
    assert (journal.description, journal.status, journal.has_model, journal.rows) == ("", "", False, [])
    assert journal.begun["name"] == "vit 1"
    assert journal.run_id is None


def test_the_run_it_adopts_is_its_run_before_any_delivery(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, name="vit 1", experiment="tests", adopt="abc")
    assert journal.run_id == "abc"
    assert Journal(tmp_path).run_id == "abc"


def test_the_position_grows_and_is_the_size_of_the_file(journal: Journal) -> None:
    path, positions = journal.folder / EVENTS, [0, journal.position]
    for step in range(3):
        journal.metrics({"loss": 1.0}, step, row=True)
        positions.append(journal.position)
        assert journal.position == path.stat().st_size
    assert positions == sorted(set(positions))
    assert [0, *(behind for _, behind in read_events(path))] == positions
    assert Journal(journal.folder).position == positions[-1]


def test_reading_starts_at_any_position_between_two_events(journal: Journal) -> None:
    for step in range(5):
        journal.metrics({"loss": 1.0}, step)
    path = journal.folder / EVENTS
    everything = list(read_events(path))
    for number, (_, behind) in enumerate(everything):
        assert list(read_events(path, behind)) == everything[number + 1 :]


def test_a_file_is_copied_as_it_is_now(journal: Journal, tmp_path: Path) -> None:
    source = tmp_path / "report.txt"
    source.write_text("as it was")
    journal.file(source, "reports")
    source.write_text("changed")
    event = events(journal.folder)[-1]
    assert (journal.folder / event["path"]).read_text() == "as it was"
    assert event["folder"] == "reports"


def test_several_files_of_one_name_do_not_meet(journal: Journal, tmp_path: Path) -> None:
    for text in ("one", "two"):
        target = journal.new_file("figures/loss.txt")
        target.write_text(text)
        journal.written(target, "figures/loss.txt")
    found = events(journal.folder)[1:]
    assert [(journal.folder / event["path"]).read_text() for event in found] == ["one", "two"]
    assert {event["folder"] for event in found} == {"figures"}


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"bytes": 7}'])
def test_a_broken_note_of_what_was_delivered_means_nothing_was(journal: Journal, content: str) -> None:
    write_delivered(journal.folder, {"bytes": journal.position, "run_id": "abc", "experiment_id": "1"})
    assert (waiting_events(journal.folder), journal.run_id) == (0, "abc")
    (journal.folder / "delivered.json").write_text(content)
    assert read_delivered(journal.folder) == {"bytes": 0, "run_id": None, "experiment_id": None}
    assert waiting_events(journal.folder) == 1


def test_journals_are_found_the_oldest_first(tmp_path: Path) -> None:
    for name in ("20260102-b", "20260101-c", "20260103-a"):
        Journal.create(tmp_path / name, name=name, experiment="tests")
    (tmp_path / "empty").mkdir()
    assert [path.name for path in journals(tmp_path)] == ["20260101-c", "20260102-b", "20260103-a"]
    assert journals(tmp_path / "missing") == []


def test_lines_are_json_that_others_can_read(journal: Journal) -> None:
    journal.append("params", values={"path": Path("a/b"), "ü": "ß"})
    line = (journal.folder / EVENTS).read_bytes().splitlines()[-1]
    assert json.loads(line)["values"] == {"path": "a/b", "ü": "ß"}
