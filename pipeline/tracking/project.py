"""The project's view of its store: the row that `mlflow run` made, and the UI."""

import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import urlparse

from pipeline.errors import UserError
from pipeline.tracking.journal import EVENTS, Journal
from pipeline.tracking.run import RUN_FILE, read_reference
from pipeline.tracking.store import UnreachableError, connect, root, short, tracking_uri, without_password


def note_project_run(experiment: str, stages: list[str], test: Mapping[str, float]) -> None:
    """Makes the row of `mlflow run` meaningful, also when every stage was cached and it trained nothing.

    The row gets the stages that ran, the run its model comes from, and that run's final metrics. A store that
    does not answer is said, and no failure.
    """
    row_id = os.environ.get("MLFLOW_RUN_ID")
    if not row_id:
        return
    try:
        client = connect(experiment).client
        client.set_tag(row_id, "pipeline.stages_run", " ".join(stages) or "none: all cached")
        if RUN_FILE.is_file() and (reference := read_reference())["run_id"] != row_id:
            _describe_row(client, row_id, reference, stages, test)
    except (UnreachableError, OSError) as error:
        print(f"the row of this `mlflow run` says nothing, as MLflow does not answer ({error})")
    except UserError:
        raise
    except Exception as error:  # MLflow's and its libraries'
        print(f"the row of this `mlflow run` could not be written ({short(error)})")


def _describe_row(
    client: Any, row_id: str, reference: Mapping[str, Any], stages: list[str], test: Mapping[str, float]
) -> None:
    from mlflow.entities import Metric

    final, told, ended = _of_training(client, reference)
    final = {k: v for k, v in (final or test).items() if not k.startswith("system/")}
    values = [Metric(name, value, ended, reference["step"]) for name, value in final.items()]
    client.log_batch(row_id, metrics=values)
    client.update_run(row_id, name=f"{reference['run_name']} (trained before)")
    client.set_tag(row_id, "pipeline.training_run_id", reference["run_id"])
    done = f"Stages run: {' '.join(stages)}." if stages else "Nothing had to run: all stages were cached."
    text = f"{done} The model is of run `{reference['run_id']}` ({reference['run_name']}).\n\n{told}"
    client.set_tag(row_id, "mlflow.note.content", text)


def _of_training(client: Any, reference: Mapping[str, Any]) -> tuple[dict[str, float], str, int]:
    """The training's last values, its description and its end: from the store, else from its journal."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(reference["run_id"])
        return run.data.metrics, run.data.tags.get("mlflow.note.content", ""), run.info.end_time or 0
    except MlflowException:
        folder = root() / reference.get("journal", "none")
    if not (folder / EVENTS).is_file():
        return {}, "", 0
    journal = Journal(folder)
    last = {name: value for row in journal.rows for name, value in row.items() if name != "step"}
    return last, journal.description, int(journal.begun["time"])


def serve_ui(experiment: str, port: int) -> NoReturn:
    """Becomes `mlflow ui` on the project's store; the store is made first, with its experiment.

    A UI that made it would give the Default experiment a location that later runs cannot write to. The
    process is replaced, so that Ctrl-C and SIGTERM reach the server itself and nothing is left behind.
    """
    uri = tracking_uri()
    if urlparse(uri).scheme in ("http", "https"):
        raise UserError(f"MLFLOW_TRACKING_URI is a server's, {without_password(uri)}: open that in a browser")
    try:
        connect(experiment)
    except UnreachableError as error:
        raise UserError(f"the MLflow store does not answer: {error}") from None
    print(
        f"http://127.0.0.1:{port} shows the runs in 15 to 20 seconds (pick Model training at the top left); "
        "Ctrl-C ends it",
        flush=True,
    )
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri, "--host", "127.0.0.1"]
    os.chdir(root())
    os.execv(sys.executable, [*command, "--port", str(port)])
