"""From a journal to MLflow: in order, in batches, each event once, also when it is sent twice.

How far it came is written down after each call. A process killed between a call and that note sends the
call again: metrics, params and tags are the same then and change nothing; a run and a model that were just
made are looked for before they are made. Two processes never deliver one journal at once.
"""

import math
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.tracking.journal import (
    EVENTS,
    Event,
    journals,
    read_delivered,
    read_events,
    waiting_events,
    write_delivered,
)
from pipeline.tracking.model import deliver_model
from pipeline.tracking.store import GONE_CODES, Store, UnreachableError, connect, is_passing, short

METRICS_A_BATCH = 1000  # MLflow's limits of one call
PARAMS_A_BATCH = 100
VALUE_CHARACTERS = 6000  # of a param's value
TAG = "tightfit.journal"
INACTIVE = "must be in the 'active' state"  # MLflow of a run in its bin
EVENTS_AT_A_TIME = 500


class GoneError(Exception):
    """The run was deleted in MLflow: there is nobody to deliver to."""


class Delivery:
    """Of one journal; the store is opened at the first call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refused = 0  # events that MLflow will not have
        self._store: Store | None = None

    def run(self) -> int:
        """Sends what waits; returns the number of events sent.

        Raises UnreachableError where the store does not answer, GoneError where it has not got the run, and
        UserError where it cannot be used at all.
        """
        from filelock import FileLock, Timeout

        try:
            with FileLock(self.folder / "delivery.lock", timeout=0):
                return self._run()
        except Timeout:
            return 0  # another process is at it

    def _run(self) -> int:
        sent = 0
        while True:
            state = read_delivered(self.folder)
            chunk = list(islice(read_events(self.folder / EVENTS, state["bytes"]), EVENTS_AT_A_TIME))
            if not chunk:
                return sent
            for kind, group in groupby(chunk, key=lambda entry: entry[0]["kind"]):
                for events, position in _calls(kind, list(group)):
                    self._call(kind, events, state)
                    state["bytes"] = position
                    write_delivered(self.folder, state)
                    sent += len(events)

    def _call(self, kind: str, events: list[Event], state: dict[str, Any]) -> None:
        """One call of MLflow's; of one that it refuses for good, each value by itself, and then none."""
        try:
            if self._store is None:
                self._store = connect(_experiment(self.folder))
            self._send(self._store, kind, events, state)
        except (UserError, UnreachableError):
            raise
        except Exception as error:
            code = getattr(error, "error_code", None)
            if code is None and not is_passing(error):  # a fault inside MLflow: it may pass too
                raise UnreachableError(f"{type(error).__name__}: {short(error)}") from None
            if code in GONE_CODES or INACTIVE in str(error):
                run_id = state["run_id"] or events[0].get("adopt")
                raise GoneError(f"MLflow run {run_id} is not in the store any more") from None
            if is_passing(error):
                raise UnreachableError(short(error)) from None
            alone = _values_alone(kind, events)
            for one in alone:
                self._call(kind, [one], state)
            if not alone:
                self.refused += 1
                print(f"MLflow will not have {kind} of the journal {self.folder}: {short(error)}")

    def _send(self, store: Store, kind: str, events: list[Event], state: dict[str, Any]) -> None:
        client, event = store.client, events[0]
        if kind == "run":
            state["run_id"], state["experiment_id"] = _run_of(store, event)
            return
        run_id = state["run_id"]
        if kind == "metrics":
            client.log_batch(run_id, metrics=_metrics(events))
        elif kind == "params":
            client.log_batch(run_id, params=_params(event["values"]))
        elif kind == "tags":
            for name, value in event["values"].items():
                client.set_tag(run_id, name, str(value)[:VALUE_CHARACTERS])
        elif kind == "describe":
            client.set_tag(run_id, "mlflow.note.content", event["text"])
        elif kind == "dataset":
            _log_dataset(client, run_id, event)
        elif kind == "status":
            _set_status(client, run_id, event)
        else:
            self._send_file(store, kind, event, state)

    def _send_file(self, store: Store, kind: str, event: Event, state: dict[str, Any]) -> None:
        path = self.folder / event["path"]
        if not path.exists():  # it was sent, and the note of that was lost
            return
        if kind == "model":
            deliver_model(store.client, state["run_id"], state["experiment_id"], path)
        else:
            store.client.log_artifact(state["run_id"], str(path), event["folder"])
        _remove(path)


def _calls(kind: str, group: list[tuple[Event, int]]) -> Iterator[tuple[list[Event], int]]:
    """Metrics that follow each other go together, as many values as fit into a call; others one by one."""
    batch: list[Event] = []
    position, values = 0, 0
    for event, behind in group:
        size = len(event["values"]) if kind == "metrics" else METRICS_A_BATCH
        if batch and values + size > METRICS_A_BATCH:
            yield batch, position
            batch, values = [], 0
        batch.append(event)
        position, values = behind, values + size
    if batch:
        yield batch, position


def _values_alone(kind: str, events: list[Event]) -> list[Event]:
    """The events of a refused call with one value each; none where there was one alone."""
    if kind not in ("metrics", "params", "tags"):
        return []
    alone = [event | {"values": {name: value}} for event in events for name, value in event["values"].items()]
    return alone if len(alone) > 1 else []


def _metrics(events: list[Event]) -> list[Any]:
    from mlflow.entities import Metric

    return [
        Metric(name, value, event["time"], event["step"])
        for event in events
        for name, value in event["values"].items()
        if math.isfinite(value)
    ]


def _params(values: dict[str, Any]) -> list[Any]:
    from mlflow.entities import Param

    return [Param(name, str(value)[:VALUE_CHARACTERS]) for name, value in values.items()]


def _run_of(store: Store, event: Event) -> tuple[str, str]:
    """The run of a journal: the one it adopts, the one that was made for it, or a new one."""
    client = store.client
    if event["adopt"]:
        info = client.get_run(event["adopt"]).info
        client.update_run(info.run_id, name=event["name"])
        return info.run_id, info.experiment_id
    made = client.search_runs([store.experiment_id], f"tags.`{TAG}` = '{event['id']}'", max_results=1)
    if made:
        return made[0].info.run_id, store.experiment_id
    run = client.create_run(
        store.experiment_id,
        start_time=event["time"],
        tags=event["tags"] | {TAG: event["id"]},
        run_name=event["name"],
    )
    return run.info.run_id, store.experiment_id


def _set_status(client: Any, run_id: str, event: Event) -> None:
    if event["status"] == "RUNNING":
        client.update_run(run_id, status="RUNNING")
    else:
        client.set_terminated(run_id, event["status"], end_time=event["time"])


def _log_dataset(client: Any, run_id: str, event: Event) -> None:
    """The data set as the run's input: where it lies and a digest of its files."""
    import warnings

    from mlflow.data.dataset_source_registry import resolve_dataset_source
    from mlflow.data.meta_dataset import MetaDataset
    from mlflow.entities import DatasetInput, InputTag

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow knows a local folder under two names
        source = resolve_dataset_source(event["source"])
    dataset = MetaDataset(source, name=event["name"], digest=event["digest"])
    tag = InputTag("mlflow.data.context", "training")
    entry = DatasetInput(dataset=dataset._to_mlflow_entity(), tags=[tag])
    client.log_inputs(run_id, datasets=[entry])


def _experiment(folder: Path) -> str:
    """The first event is the run."""
    event, _ = next(read_events(folder / EVENTS))
    return str(event["experiment"])


def _remove(path: Path) -> None:
    import shutil

    shutil.rmtree(path.parent, ignore_errors=True)


def deliver_all(folder: Path) -> list[tuple[Path, int, int, str]]:
    """Every journal under `folder`: how many events were sent, how many wait on, and why."""
    found = []
    for journal in journals(folder):
        before, why = waiting_events(journal), ""
        try:
            Delivery(journal).run()
        except (UnreachableError, GoneError, UserError) as error:
            why = str(error)
        waiting = waiting_events(journal)
        found.append((journal, before - waiting, waiting, why or "another process delivers it"))
    return found
