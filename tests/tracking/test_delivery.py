"""From a journal to MLflow: all of it, each event once, whatever was sent before."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from stored import EXPERIMENT, Store

from pipeline.tracking import Journal, Run, deliver_all, waiting_events
from pipeline.tracking.delivery import Delivery, GoneError
from pipeline.tracking.journal import EVENTS, read_delivered, read_events, write_delivered
from pipeline.tracking.store import UnreachableError

STEPS, KEYS = 30, 50  # 1500 values: more than one call of MLflow's takes
LONG = "x" * 7000  # longer than MLflow takes


@pytest.fixture
def journal(store: Store) -> Journal:
    return Journal.create(store.folder / "journals" / "a", name="vit 1", experiment=EXPERIMENT)


def fill(run: Run, folder: Path) -> None:
    """All that a run can say, but a model."""
    data = folder / "data"
    data.mkdir()
    (data / "train.npz").write_bytes(b"1234")
    run.params({f"param.{number}": number for number in range(130)} | {"long": LONG})
    run.tags({"device": "cpu", "count": 3})
    for step in range(STEPS):
        run.row({f"key.{key}": step + key / 100 for key in range(KEYS)}, step)
    run.describe("early")
    run.describe("**late**")
    run.text("as text", "notes/a.txt")
    run.json({"a": 1}, "top.json")
    run.file(data, "folders")
    run.dataset(data, {"source": "pipeline.data.digits", "sha256": {"train.npz": "ab" * 32}})
    run.journal.append("status", status="FINISHED")


def artifacts(store: Store, run_id: str) -> dict[str, str]:
    folder = Path(mlflow.artifacts.download_artifacts(run_id=run_id, tracking_uri=store.uri))
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def assert_complete(store: Store) -> None:
    """What `fill` said stands there, once."""
    run = store.run()
    assert store.rows(run.info.run_id) == STEPS * KEYS
    assert run.data.metrics == {f"key.{key}": STEPS - 1 + key / 100 for key in range(KEYS)}
    assert len(run.data.params) == 131
    assert run.data.params["param.129"] == "129"
    assert run.data.params["long"] == LONG[:6000]
    assert (run.data.tags["device"], run.data.tags["count"]) == ("cpu", "3")
    assert run.data.tags["mlflow.note.content"] == "**late**"
    assert (run.info.run_name, run.info.status) == ("vit 1", "FINISHED")
    (given,) = run.inputs.dataset_inputs
    assert given.dataset.name == "digits"
    assert str(store.folder / "data") in given.dataset.source
    assert [tag.value for tag in given.tags] == ["training"]
    found = artifacts(store, run.info.run_id)
    assert found == {"notes/a.txt": "as text", "top.json": '{\n  "a": 1\n}', "folders/data/train.npz": "1234"}


def test_all_of_a_journal_arrives(store: Store, journal: Journal) -> None:
    fill(Run(journal), store.folder)
    events = waiting_events(journal.folder)
    assert Delivery(journal.folder).run() == events
    assert_complete(store)
    assert waiting_events(journal.folder) == 0
    assert read_delivered(journal.folder)["bytes"] == journal.position
    assert Run(journal).id == store.run().info.run_id
    assert list((journal.folder / "files").iterdir()) == []  # what was sent is not kept twice


def test_times_and_steps_are_those_of_the_journal(
    store: Store, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr("time.time", lambda: 1_700_000_000.5)
        journal.metrics({"loss": 2.0}, 7)
        journal.append("status", status="FINISHED")
    Delivery(journal.folder).run()
    (metric,) = store.client.get_metric_history(store.run().info.run_id, "loss")
    assert (metric.timestamp, metric.step, metric.value) == (1_700_000_000_500, 7, 2.0)
    assert store.run().info.end_time == 1_700_000_000_500


def test_what_is_delivered_is_not_sent_again(store: Store, journal: Journal) -> None:
    delivery = Delivery(journal.folder)
    assert delivery.run() == 1
    journal.metrics({"loss": 2.0}, 1)
    assert delivery.run() == 1
    assert delivery.run() == 0
    assert Delivery(journal.folder).run() == 0
    assert store.rows(store.run().info.run_id) == 1


def test_a_journal_whose_note_is_lost_is_the_same_run(store: Store, journal: Journal) -> None:
    fill(Run(journal), store.folder)
    events = Delivery(journal.folder).run()
    (journal.folder / "delivered.json").unlink()
    assert Delivery(journal.folder).run() == events
    assert_complete(store)


def test_a_kill_between_any_call_and_its_note_changes_nothing(store: Store, journal: Journal) -> None:
    fill(Run(journal), store.folder)
    Delivery(journal.folder).run()
    state = read_delivered(journal.folder)
    positions = [behind for _, behind in read_events(journal.folder / EVENTS)]
    for position in (positions[0], *positions[3::9]):
        write_delivered(journal.folder, state | {"bytes": position})
        Delivery(journal.folder).run()
        assert read_delivered(journal.folder) == state
    assert_complete(store)


def test_two_that_deliver_at_once_deliver_each_event_once(store: Store, journal: Journal) -> None:
    fill(Run(journal), store.folder)
    events = waiting_events(journal.folder)
    with ThreadPoolExecutor() as pool:
        sent = list(pool.map(lambda _: Delivery(journal.folder).run(), range(4)))
    assert sum(sent) == max(sent) == events  # the others leave it to the first
    assert_complete(store)


class Killed(BaseException):
    """Where a SIGKILL would end the process."""


@pytest.mark.parametrize("before", [True, False])
def test_a_delivery_killed_at_every_note_delivers_each_event_once(
    store: Store, journal: Journal, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    fill(Run(journal), store.folder)
    killed_at: list[int] = []

    def note(folder: Path, values: dict[str, Any]) -> None:
        position = values["bytes"]
        if before and position not in killed_at:
            killed_at.append(position)
            raise Killed
        write_delivered(folder, values)
        if not before:
            killed_at.append(position)
            raise Killed

    monkeypatch.setattr("pipeline.tracking.delivery.write_delivered", note)
    while waiting_events(journal.folder):
        with suppress(Killed):
            Delivery(journal.folder).run()
    assert len(killed_at) == len(set(killed_at)) == 13  # the calls
    assert_complete(store)


@pytest.mark.parametrize("call", ["create_logged_model", "log_model_artifacts", "finalize_logged_model"])
def test_a_model_whose_delivery_is_killed_within_is_there_once(
    store: Store, journal: Journal, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real = getattr(mlflow.MlflowClient, call)

    def killed(*arguments: Any, **named: Any) -> None:
        real(*arguments, **named)
        raise Killed

    network, example = small_model()
    Run(journal).model(network, example)
    with monkeypatch.context() as fault:
        fault.setattr(mlflow.MlflowClient, call, killed)
        with pytest.raises(Killed):
            Delivery(journal.folder).run()
    Delivery(journal.folder).run()
    assert_same_outputs(store, network, example)


def small_model() -> tuple[torch.nn.Module, np.ndarray]:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 3)).eval(), np.ones((2, 5), np.float32)


def assert_same_outputs(store: Store, network: torch.nn.Module, example: np.ndarray) -> None:
    """The one model of the one run loads back, and computes what `network` does."""
    run = store.run()
    (logged,) = store.client.search_logged_models([run.info.experiment_id])
    assert (logged.source_run_id, str(logged.status), logged.name) == (run.info.run_id, "READY", "model")
    assert [model.model_id for model in run.outputs.model_outputs] == [logged.model_id]
    loaded = mlflow.pytorch.load_model(f"models:/{logged.model_id}")
    with torch.no_grad():
        assert torch.equal(loaded(torch.from_numpy(example)), network(torch.from_numpy(example)))


def test_the_model_loads_back_with_equal_outputs_and_a_second_is_ignored(
    store: Store, journal: Journal
) -> None:
    network, example = small_model()
    run = Run(journal)
    run.model(network, example)
    size = journal.position
    other = torch.nn.Sequential(torch.nn.Linear(5, 3))
    run.model(other, example)
    Run(Journal(journal.folder)).model(other, example)
    assert journal.position == size
    Delivery(journal.folder).run()
    assert_same_outputs(store, network, example)
    assert list((journal.folder / "files").iterdir()) == []
    write_delivered(journal.folder, read_delivered(journal.folder) | {"bytes": 0})
    Delivery(journal.folder).run()
    assert_same_outputs(store, network, example)


class Branching(torch.nn.Module):
    """Cannot be exported: its path depends on the values."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given + 1 if given.sum() > 0 else given - 1


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_cannot_be_exported_is_a_pickle(
    store: Store, journal: Journal, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, example = Branching().eval(), np.ones((2, 5), np.float32)
    Run(journal).model(network, example)
    assert "the model cannot be exported" in capsys.readouterr().out
    Delivery(journal.folder).run()
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "true")
    assert_same_outputs(store, network, example)


def test_a_run_is_adopted_by_its_id(store: Store) -> None:
    client = store.client
    experiment = client.create_experiment(EXPERIMENT, (store.folder / "mlruns").as_uri())
    given = client.create_run(experiment, run_name="of mlflow run").info.run_id
    folder = store.folder / "journals" / "a"
    journal = Journal.create(folder, name="vit 1", experiment=EXPERIMENT, adopt=given)
    fill(Run(journal), store.folder)
    Delivery(folder).run()
    (folder / "delivered.json").unlink()
    Delivery(folder).run()
    assert Run(journal).id == given == store.run().info.run_id
    assert_complete(store)


def test_the_tags_it_begins_with_are_the_runs(store: Store) -> None:
    tags = {"mlflow.source.name": "train.py", "mlflow.user": "ada"}
    journal = Journal.create(store.folder / "a", name="vit 1", experiment=EXPERIMENT, tags=tags)
    Delivery(journal.folder).run()
    assert tags.items() <= store.run().data.tags.items()


def test_what_mlflow_refuses_is_passed_over_with_a_message_and_the_rest_arrives(
    store: Store, journal: Journal, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(journal)
    run.params({"rate": 1})
    run.params({"rate": 2})
    run.params({"epochs": 3})
    run.metrics({"loss": 2.0}, 2)
    run.tags({"after": "all"})
    delivery = Delivery(journal.folder)
    delivery.run()
    said = capsys.readouterr().out.splitlines()
    assert delivery.refused == len(said)
    assert said[0].startswith(f"MLflow will not have params of the journal {journal.folder}: ")
    assert waiting_events(journal.folder) == 0
    data = store.run().data
    assert data.params == {"rate": "1", "epochs": "3"}
    assert data.metrics["loss"] == 2.0
    assert data.tags["after"] == "all"
    assert Delivery(journal.folder).run() == 0  # and is not tried again


def test_a_fault_inside_mlflow_loses_nothing_and_the_next_attempt_goes_on(
    store: Store, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(journal).params({"rate": 1})
    journal.metrics({"loss": 2.0}, 1)
    delivery = Delivery(journal.folder)

    def fault(*args: object, **kwargs: object) -> None:
        raise AttributeError("partially initialized module")

    with monkeypatch.context() as broken:
        broken.setattr(mlflow.MlflowClient, "log_batch", fault)
        with pytest.raises(UnreachableError, match="AttributeError: partially initialized module"):
            delivery.run()
        assert waiting_events(journal.folder) == 2
    delivery.run()
    assert waiting_events(journal.folder) == 0
    assert (store.run().data.params, store.run().data.metrics) == ({"rate": "1"}, {"loss": 2.0})


def test_a_param_that_changes_takes_no_other_with_it(store: Store, journal: Journal) -> None:
    run = Run(journal)
    run.params({"rate": 1})
    run.params({"rate": 2, "epochs": 3, "depth": 4})
    Delivery(journal.folder).run()
    assert store.run().data.params == {"rate": "1", "epochs": "3", "depth": "4"}


@pytest.mark.parametrize("name", ["top@1", "x" * 300])
def test_a_metric_whose_name_mlflow_refuses_takes_no_other_with_it(
    store: Store, journal: Journal, name: str
) -> None:
    for step in range(3):
        journal.metrics({"loss": 2.0, name: 1.0}, step)
    journal.metrics({"accuracy": 0.5}, 3)
    Delivery(journal.folder).run()
    assert store.run().data.metrics == {"loss": 2.0, "accuracy": 0.5}


def test_a_run_deleted_in_mlflow_is_gone_for_good(store: Store, journal: Journal) -> None:
    delivery = Delivery(journal.folder)
    delivery.run()
    run_id = store.run().info.run_id
    store.client.delete_run(run_id)
    for _ in range(2):
        journal.metrics({"loss": 2.0}, 1 + waiting_events(journal.folder))
        with pytest.raises(GoneError, match=run_id):
            delivery.run()
    assert waiting_events(journal.folder) == 2


def test_a_run_that_was_to_be_adopted_and_is_not_there_is_gone(store: Store) -> None:
    journal = Journal.create(store.folder / "a", name="vit 1", experiment=EXPERIMENT, adopt="0" * 32)
    with pytest.raises(GoneError, match="0000 is not in the store any more"):
        Delivery(journal.folder).run()
    assert store.runs() == []


def test_all_journals_of_a_folder_are_delivered_and_one_that_fails_keeps_none(store: Store) -> None:
    for name, adopt in (("1", None), ("2", "0" * 32), ("3", None)):
        journal = Journal.create(
            store.folder / "journals" / name, name=name, experiment=EXPERIMENT, adopt=adopt
        )
        journal.metrics({"loss": float(name)}, 1)
    found = deliver_all(store.folder / "journals")
    assert [(path.name, sent, left) for path, sent, left, _ in found] == [
        ("1", 2, 0),
        ("2", 0, 2),
        ("3", 2, 0),
    ]
    assert "is not in the store any more" in found[1][3]
    assert {run.info.run_name: run.data.metrics["loss"] for run in store.runs()} == {"1": 1.0, "3": 3.0}
