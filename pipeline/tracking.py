"""One row of the MLflow UI is one experiment. The only module that imports mlflow.

`train` starts a run, or adopts the one that `mlflow run` made; `evaluate` adds to it. The store is
MLFLOW_TRACKING_URI, else mlflow.db beside params.yaml; also for runs in the copies that `dvc exp run
--queue` and `--temp` make, which find the project through DVC_ROOT. mlflow is imported where it is used:
it takes two seconds.
"""

import hashlib
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlparse

from pipeline import files, provenance
from pipeline.errors import UserError

RUN_FILE = Path("reports/mlflow_run.json")
MADE_BY = "dvc repro train"
FLUSH_SECONDS = 5.0  # metrics wait at most so long, and go out in one call
METRICS_A_BATCH = 1000  # MLflow's limit of one log_batch
VALUE_CHARACTERS = 6000  # MLflow's limit of a param's value
SYSTEM_METRICS_SECONDS = 5.0


def root() -> Path:
    """The project's folder: the real one, also inside a copy that DVC made for an experiment."""
    return Path(os.environ.get("DVC_ROOT") or Path(__file__).resolve().parents[1])


@dataclass(frozen=True)
class Store:
    client: Any
    experiment_id: str


def connect(experiment: str) -> Store:
    """Opens the store and the project's experiment, made on first use; safe for several processes at once.

    Raises UserError for a store that cannot be opened or would write to a wrong place.
    """
    from filelock import FileLock

    uri = _tracking_uri()
    mlflow = _mlflow()
    lock = root() / ".dvc" / "tmp" / "mlflow-store.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):  # two processes that make the database at once would break it
            mlflow.set_tracking_uri(uri)
            client = mlflow.MlflowClient()
            return Store(client, _chosen_experiment(client, uri) or _experiment_id(client, experiment, uri))
    except UserError:
        raise
    except Exception as error:  # MLflow raises many kinds: its own, SQLAlchemy's, requests'
        raise UserError(f"the MLflow store {_without_password(uri)} cannot be used: {error}") from None


def _mlflow() -> Any:
    """mlflow, without its notes on creating the database."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    import mlflow

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    return mlflow


def _tracking_uri() -> str:
    """MLFLOW_TRACKING_URI, else mlflow.db in the project; a relative database is made absolute."""
    given = os.environ.get("MLFLOW_TRACKING_URI", "")
    stale = next((root() / "mlruns").glob("*/meta.yaml"), None)
    if not given and stale:
        raise UserError(
            f"{root() / 'mlruns'} holds an older MLflow file store ({stale.name} in {stale.parent.name}/), "
            "which `mlflow ui` and `mlflow run` would take instead of mlflow.db: move it away "
            "(`mv mlruns mlruns.old`), or set MLFLOW_TRACKING_URI to the store you want"
        )
    if not given:
        return f"sqlite:///{root() / 'mlflow.db'}"
    if given.startswith("sqlite:///") and not given.startswith("sqlite:////"):
        return f"sqlite:///{root() / given.removeprefix('sqlite:///')}"
    return given


def _experiment_id(client: Any, name: str, uri: str) -> str:
    """The experiment of that name, made with an artifact location of its own in a local store."""
    location = (root() / "mlruns" / name).as_uri() if uri.startswith("sqlite:") else None
    found = client.get_experiment_by_name(name)
    if found is None:
        return str(client.create_experiment(name, artifact_location=location))
    if found.lifecycle_stage == "deleted":
        raise UserError(
            f"the MLflow experiment {name} was deleted: `mlflow experiments restore "
            f"-x {found.experiment_id}`, or set tracking.experiment to another name"
        )
    local = _local_path(found.artifact_location)
    own_store = uri == f"sqlite:///{root() / 'mlflow.db'}"
    if own_store and local is not None and not local.is_relative_to(root()):
        raise UserError(
            f"the MLflow experiment {name} keeps its artifacts in {local}, outside this project: it was "
            "copied or moved with its mlflow.db. Set tracking.experiment to a new name, or remove mlflow.db "
            "and mlruns/ here to begin afresh"
        )
    return str(found.experiment_id)


def _chosen_experiment(client: Any, uri: str) -> str | None:
    """The experiment that `mlflow run` chose, unless its artifacts cannot be written from here."""
    chosen = os.environ.get("MLFLOW_EXPERIMENT_ID")
    if not chosen:
        return None
    location = client.get_experiment(chosen).artifact_location
    if location.startswith("mlflow-artifacts:") and urlparse(uri).scheme not in ("http", "https"):
        # a UI that was started first gave the experiment a location that only its server can write
        print(f"experiment {chosen} keeps its artifacts on a server: the run goes to the project's own")
        return None
    return chosen


def _local_path(location: str) -> Path | None:
    """The folder an artifact location means, None where it is no local one."""
    parsed = urlparse(location)
    return Path(unquote(parsed.path)) if parsed.scheme in ("", "file") else None


def _without_password(uri: str) -> str:
    parsed = urlparse(uri)
    return uri.replace(f":{parsed.password}@", ":***@") if parsed.password else uri


class Run:
    """A run that is being written: metrics are buffered and go out in batches, finite values only."""

    def __init__(self, store: Store, run_id: str, adopted: bool = False) -> None:
        self.client = store.client
        self.id = run_id
        self.adopted = adopted
        self._waiting: list[Any] = []
        self._flushed = time.monotonic()

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Notes values at `step`; inf and NaN are left out, as MLflow's pages cannot show them."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting += [
            Metric(name, float(value), now, step) for name, value in values.items() if math.isfinite(value)
        ]
        waited = time.monotonic() - self._flushed
        if waited > FLUSH_SECONDS or len(self._waiting) > METRICS_A_BATCH // 2:
            self.flush()

    def flush(self) -> None:
        for start in range(0, len(self._waiting), METRICS_A_BATCH):
            batch = self._waiting[start : start + METRICS_A_BATCH]
            self.client.log_batch(self.id, metrics=batch)
        self._waiting = []
        self._flushed = time.monotonic()

    def params(self, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        entries = [Param(name, str(value)[:VALUE_CHARACTERS]) for name, value in values.items()]
        for start in range(0, len(entries), 100):  # MLflow's limit of one call
            self.client.log_batch(self.id, params=entries[start : start + 100])

    def tags(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.client.set_tag(self.id, name, str(value)[:VALUE_CHARACTERS])

    def describe(self, text: str) -> None:
        """The description that the run page shows first; markdown."""
        self.client.set_tag(self.id, "mlflow.note.content", text)

    def description(self) -> str:
        return str(self.client.get_run(self.id).data.tags.get("mlflow.note.content", ""))

    def text(self, text: str, path: str) -> None:
        self.client.log_text(self.id, text, path)

    def json(self, value: Any, path: str) -> None:
        self.client.log_dict(self.id, value, path)

    def file(self, path: Path, folder: str | None = None) -> None:
        self.client.log_artifact(self.id, str(path), folder)

    def figure(self, figure: Any, path: str) -> None:
        self.client.log_figure(self.id, figure, path)

    def dataset(self, folder: Path, description: Mapping[str, Any]) -> None:
        """The data set as the run's input: where it lies and a digest of its files."""
        from mlflow.data.dataset_source_registry import resolve_dataset_source
        from mlflow.data.meta_dataset import MetaDataset
        from mlflow.entities import DatasetInput, InputTag

        joined = "".join(f"{name}{digest}" for name, digest in sorted(description["sha256"].items()))
        digest = hashlib.sha256(joined.encode()).hexdigest()[:32]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow knows a local folder under two names
            source = resolve_dataset_source(str(folder.absolute()))
        dataset = MetaDataset(source, name=description["source"].rsplit(".", 1)[-1], digest=digest)
        tag = InputTag("mlflow.data.context", "training")
        entry = DatasetInput(dataset=dataset._to_mlflow_entity(), tags=[tag])
        self.client.log_inputs(self.id, datasets=[entry])

    def model(self, model: Any, example: Any) -> None:
        """Logs the torch model (on the CPU, in evaluation mode) with an example input as numpy array.

        It is stored as an exported program, which loads without this project; a model that cannot be
        exported is stored as a pickle, which needs its code.
        """
        mlflow = _mlflow()
        wanted = ("torch", "torchvision", "numpy")
        requirements = [line for line in provenance.packages().split() if line.split("==")[0] in wanted]
        arguments = {"name": "model", "pip_requirements": requirements, "input_example": example}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with mlflow.start_run(run_id=self.id):
                try:
                    mlflow.pytorch.log_model(model, **arguments)
                except Exception as error:
                    print(
                        f"the model cannot be exported ({str(error).splitlines()[0]:.200}): logged as pickle"
                    )
                    mlflow.pytorch.log_model(model, serialization_format="pickle", **arguments)
        self.client.update_run(self.id, status="RUNNING")  # leaving start_run's block ended it


@contextmanager
def training_run(experiment: str, name: str) -> Iterator[Run]:
    """The run of a training: ended FINISHED, FAILED on an exception, KILLED on Ctrl-C or SIGTERM.

    A run that `mlflow run` made is adopted, and on success left for it to end.
    """
    store = connect(experiment)
    run = _adopted(store) or _created(store)
    store.client.update_run(run.id, status="RUNNING", name=name)
    system = _system_metrics(run.id)
    try:
        yield run
    except (KeyboardInterrupt, SystemExit):
        _end(run, "KILLED", system)
        raise
    except BaseException:
        _end(run, "FAILED", system)
        raise
    _end(run, None if run.adopted else "FINISHED", system)


def _adopted(store: Store) -> Run | None:
    """The run that `mlflow run` made for this process, if it stands in the experiment we write to."""
    run_id = os.environ.get("MLFLOW_RUN_ID")
    if not run_id:
        return None
    try:
        info = store.client.get_run(run_id).info
    except Exception as error:
        print(f"MLFLOW_RUN_ID={run_id} is not in the store ({error}): the training gets a run of its own")
        return None
    return Run(store, run_id, adopted=True) if info.experiment_id == store.experiment_id else None


def _created(store: Store) -> Run:
    from mlflow.tracking.context.registry import resolve_tags

    return Run(store, store.client.create_run(store.experiment_id, tags=resolve_tags()).info.run_id)


def _system_metrics(run_id: str) -> Any:
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor(run_id, sampling_interval=SYSTEM_METRICS_SECONDS)
    monitor.start()
    return monitor


def _end(run: Run, status: str | None, system: Any) -> None:
    system.finish()
    run.flush()
    if status:
        run.client.set_terminated(run.id, status)


def save_reference(run: Run, step: int) -> None:
    """Writes reports/mlflow_run.json: which run the model belongs to, and its last step."""
    info = run.client.get_run(run.id).info
    reference = {
        "run_id": run.id,
        "run_name": info.run_name,
        "experiment_id": info.experiment_id,
        "step": step,
    }
    files.write_json(RUN_FILE, reference)


def read_reference() -> dict[str, Any]:
    reference: dict[str, Any] = files.read_json(RUN_FILE, MADE_BY)
    return reference


def existing_run(experiment: str, run_id: str) -> Run | None:
    """The run of that id for adding to it; None when the store does not have it (another clone's)."""
    store = connect(experiment)
    from mlflow.exceptions import MlflowException

    try:
        store.client.get_run(run_id)
    except MlflowException:
        return None
    return Run(store, run_id)


def note_project_run(experiment: str, stages: list[str], test: Mapping[str, float]) -> None:
    """Makes the row of `mlflow run` meaningful, also when every stage was cached and it trained nothing.

    The row gets the stages that ran, the run its model comes from, and that run's final metrics.
    """
    run_id = os.environ.get("MLFLOW_RUN_ID")
    row = existing_run(experiment, run_id) if run_id else None
    if row is None:
        return
    row.tags({"pipeline.stages_run": " ".join(stages) or "none: all cached"})
    if not RUN_FILE.is_file():
        return
    reference = read_reference()
    if reference["run_id"] == row.id:
        return
    training = existing_run(experiment, reference["run_id"])
    final = training.client.get_run(training.id).data.metrics if training else test
    row.metrics({k: v for k, v in final.items() if not k.startswith("system/")}, reference["step"])
    row.flush()
    row.client.update_run(row.id, name=f"{reference['run_name']} (trained before)")
    row.tags({"pipeline.training_run_id": reference["run_id"]})
    done = f"Stages run: {' '.join(stages)}." if stages else "Nothing had to run: all stages were cached."
    told = training.description() if training else ""
    row.describe(f"{done} The model is of run `{reference['run_id']}` ({reference['run_name']}).\n\n{told}")


def serve_ui(experiment: str, port: int) -> NoReturn:
    """Becomes `mlflow ui` on the project's store; the store is made first, with its experiment.

    A UI that made it would give the Default experiment a location that later runs cannot write to. The
    process is replaced, so that Ctrl-C and SIGTERM reach the server itself and nothing is left behind.
    """
    uri = _tracking_uri()
    if urlparse(uri).scheme in ("http", "https"):
        raise UserError(
            f"MLFLOW_TRACKING_URI is a server's, {_without_password(uri)}: open that in a browser"
        )
    connect(experiment)
    print(
        f"http://127.0.0.1:{port} shows the runs in 15 to 20 seconds (pick Model training at the top left); "
        "Ctrl-C ends it",
        flush=True,
    )
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri, "--host", "127.0.0.1"]
    os.chdir(root())
    os.execv(sys.executable, [*command, "--port", str(port)])
