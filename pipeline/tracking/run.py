"""A run that is being written: by a training, or by whoever adds to a trained model's run."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.errors import Stopped
from pipeline.tracking.courier import Courier
from pipeline.tracking.journal import EVENTS, Journal
from pipeline.tracking.model import export_model
from pipeline.tracking.store import (
    UnreachableError,
    connect,
    import_mlflow,
    is_passing,
    is_remote,
    root,
    tracking_uri,
)
from pipeline.tracking.system import SystemMetrics

RUN_FILE = Path("reports/mlflow_run.json")
MADE_BY = "dvc repro train"
FIRST_ATTEMPT_SECONDS = 5.0  # a training waits at most so long for a server at its start
END_SECONDS = 30.0  # without a delivery; then the rest is left waiting
STOPPED_SECONDS = 10.0


class Run:
    """Everything goes to the journal; finite values only."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    @property
    def id(self) -> str | None:
        """Of MLflow; None as long as no server has answered."""
        return self.journal.run_id

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.journal.rows

    @property
    def has_start(self) -> bool:
        """Whether what is known before the first window is logged already."""
        return self.journal.stands_at(0)

    def row(self, values: Mapping[str, float], step: int) -> None:
        """A row of the training's table, or more of one."""
        self.journal.metrics(values, step, row=True)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.journal.metrics(values, step)

    def params(self, values: Mapping[str, Any]) -> None:
        entries = list(values.items())
        for start in range(0, len(entries), 100):  # MLflow's limit of one call
            chunk = entries[start : start + 100]
            self.journal.append("params", values={name: str(value) for name, value in chunk})

    def tags(self, values: Mapping[str, Any]) -> None:
        if values:
            self.journal.append("tags", values={name: str(value) for name, value in values.items()})

    def describe(self, text: str) -> None:
        """The description that the run page shows first; markdown."""
        self.journal.append("describe", text=text)

    @property
    def description(self) -> str:
        return self.journal.description

    def text(self, text: str, path: str) -> None:
        target = self.journal.new_file(path)
        target.write_text(text, encoding="utf-8")
        self.journal.written(target, path)

    def json(self, value: Any, path: str) -> None:
        self.text(json.dumps(value, indent=2), path)

    def file(self, path: Path, folder: str | None = None) -> None:
        self.journal.file(path, folder)

    def figure(self, figure: Any, path: str) -> None:
        target = self.journal.new_file(path)
        figure.savefig(target)
        self.journal.written(target, path)

    def dataset(self, folder: Path, description: Mapping[str, Any]) -> None:
        """The data set as the run's input: where it lies and a digest of its files."""
        joined = "".join(f"{name}{digest}" for name, digest in sorted(description["sha256"].items()))
        self.journal.append(
            "dataset",
            source=str(folder.absolute()),
            name=description["source"].rsplit(".", 1)[-1],
            digest=hashlib.sha256(joined.encode()).hexdigest()[:32],
        )

    def model(self, model: Any, example: Any) -> None:
        """The trained torch model, on the CPU and in evaluation mode; once a run. See `export_model`."""
        if self.journal.has_model:
            return
        target = self.journal.new_file("model")
        export_model(model, example, target)
        self.journal.append("model", path=str(target.relative_to(self.journal.folder)))


@contextmanager
def training_run(
    experiment: str,
    name: str,
    folder: Path,
    *,
    resumed: bool,
    run_id: str | None,
    step: Callable[[], int],
) -> Iterator[Run]:
    """The run of a training: ended FINISHED, FAILED on an exception, KILLED on Ctrl-C or SIGTERM.

    folder: of its journal. resumed: the run goes on whose journal stands there, or, where it is gone, the run
    of id `run_id`. A run that `mlflow run` made is adopted, and on success left for it to end. step: where
    the training stands, for system metrics. Raises UserError for a store that cannot be used; one that does
    not answer is no reason not to train.
    """
    if not is_remote(tracking_uri()):
        _check(experiment)
    run = Run(_journal(experiment, name, folder, resumed, run_id))
    journal, courier = run.journal, Courier(run.journal)
    if resumed and journal.status == "RUNNING":
        print(
            f"MLflow run {run.id or '(not delivered yet)'} was left RUNNING by a killed process: it goes on"
        )
    journal.append("status", status="RUNNING")
    courier.start(FIRST_ATTEMPT_SECONDS if is_remote(tracking_uri()) else END_SECONDS)
    if resumed:
        _tag_fresh_row(experiment, run)
    system = SystemMetrics(journal, step)
    system.start()
    try:
        yield run
    except BaseException as error:
        is_stop = isinstance(error, KeyboardInterrupt | SystemExit | Stopped)
        system.stop()
        journal.append("status", status="KILLED" if is_stop else "FAILED")
        # the state is saved: a store of this machine that is only slow gets its time
        courier.finish(STOPPED_SECONDS if is_stop and is_remote(tracking_uri()) else END_SECONDS)
        raise
    system.stop()
    if run.id is None or run.id != os.environ.get("MLFLOW_RUN_ID"):
        journal.append("status", status="FINISHED")
    courier.finish(END_SECONDS)


def _check(experiment: str) -> None:
    """Raises UserError at once for a local store that cannot be used."""
    with suppress(UnreachableError):  # it is locked: the courier will say so
        connect(experiment)


def _journal(experiment: str, name: str, folder: Path, resumed: bool, run_id: str | None) -> Journal:
    if resumed and (folder / EVENTS).is_file():
        return Journal(folder)
    if resumed and run_id:
        print(f"{folder} is gone: the rows so far are in MLflow alone, and not in reports/training.csv")
    import_mlflow()
    from mlflow.tracking.context.registry import resolve_tags

    adopt = run_id if resumed else _adoptable(experiment)
    return Journal.create(folder, name=name, experiment=experiment, adopt=adopt, tags=resolve_tags())


def _adoptable(experiment: str) -> str | None:
    """The run that `mlflow run` made for this process, if it stands in the experiment we write to."""
    run_id = os.environ.get("MLFLOW_RUN_ID")
    if not run_id:
        return None
    try:
        store = connect(experiment)
        info = store.client.get_run(run_id).info
    except UnreachableError:
        return run_id
    except Exception as error:
        if is_passing(error):
            return run_id
        print(f"MLFLOW_RUN_ID={run_id} is not in the store ({error}): the training gets a run of its own")
        return None
    return run_id if info.experiment_id == store.experiment_id else None


def _tag_fresh_row(experiment: str, run: Run) -> None:
    """`mlflow run` made a row for this process, and an older run is continued: the row says which."""
    fresh = os.environ.get("MLFLOW_RUN_ID")
    if not fresh or fresh == run.id:
        return
    try:
        connect(experiment).client.set_tag(fresh, "continues", run.id or run.journal.folder.name)
    except Exception as error:  # it is a note, and the training is what matters
        print(f"the row of this `mlflow run` could not be tagged ({error})")


def save_reference(run: Run, step: int) -> None:
    """Writes reports/mlflow_run.json: which run the model belongs to, and its last step.

    run_id and experiment_id are none where no server has answered yet; the journal has what waits for one.
    """
    folder, base = run.journal.folder.resolve(), root().resolve()
    reference = {
        "run_id": run.id,
        "run_name": run.journal.begun["name"],
        "experiment_id": run.journal.delivered["experiment_id"],
        "step": step,
        "journal": folder.relative_to(base).as_posix() if folder.is_relative_to(base) else str(folder),
    }
    files.write_json(RUN_FILE, reference)


def read_reference() -> dict[str, Any]:
    """What `save_reference` wrote; raises UserError where it is missing or something else."""
    id_or_none = str | None
    return files.read_json(
        RUN_FILE,
        MADE_BY,
        {"run_id": id_or_none, "run_name": str, "experiment_id": id_or_none, "step": int},
    )


@contextmanager
def evaluation_run(experiment: str) -> Iterator[Run | None]:
    """The run of reports/mlflow_run.json, for adding to it; None, and said why, where it is out of reach.

    Through its journal where that stands here; else, in another clone or after a clean-up, directly.
    """
    reference = read_reference()
    folder = root() / reference.get("journal", "none")
    with tempfile.TemporaryDirectory() as temporary:
        if (folder / EVENTS).is_file():
            journal: Journal | None = Journal(folder)
        else:
            journal = _journal_of_stored(experiment, reference, Path(temporary))
        if journal is None:
            yield None
            return
        yield Run(journal)
        courier = Courier(journal)
        courier.start(0)
        courier.finish(STOPPED_SECONDS)
        journal.close()


def _journal_of_stored(experiment: str, reference: Mapping[str, Any], folder: Path) -> Journal | None:
    """A journal for adding to a run that the store has."""
    run_id = reference["run_id"]
    try:
        tags = connect(experiment).client.get_run(run_id).data.tags if run_id else None
    except UnreachableError as error:
        print(f"MLflow does not answer ({error}): the test metrics are in reports/ alone")
        return None
    except Exception as error:
        if getattr(error, "error_code", None) is None:
            raise
        tags = None
    if tags is None:
        print(
            f"MLflow run {run_id or reference['run_name']} of this model is not in the store (it was trained "
            "in another clone?): the test metrics are in reports/ alone"
        )
        return None
    journal = Journal.create(folder, name=reference["run_name"], experiment=experiment, adopt=run_id)
    journal.description = tags.get("mlflow.note.content", "")
    return journal
