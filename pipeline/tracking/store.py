"""Where runs go: MLFLOW_TRACKING_URI, else mlflow.db beside params.yaml; and the project's experiment there.

Also for runs in the copies that `dvc exp run --queue` and `--temp` make, which find the project through
DVC_ROOT.
"""

import logging
import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from pipeline import files
from pipeline.errors import UserError

RETRIES, TIMEOUT_SECONDS = "1", "20"  # of MLflow's own calls: it is we who try again
LOCKED = ("database is locked", "disk I/O error", "database or disk is full")  # SQLite's words
REFUSED_CODES = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_ALREADY_EXISTS")
GONE_CODES = ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND")
LIBRARIES = ("requests", "urllib3", "sqlalchemy")  # whose exceptions come through


class UnreachableError(Exception):
    """The store does not answer, or not now: a server that is down, slow or ill, a locked database."""


def root() -> Path:
    """The project's folder: the real one, also inside a copy that DVC made for an experiment."""
    return Path(os.environ.get("DVC_ROOT") or Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Store:
    client: Any
    experiment_id: str


def connect(experiment: str) -> Store:
    """Opens the store and the project's experiment, made on first use; safe for several processes at once.

    Raises UserError for a store that cannot be opened or would write to a wrong place, UnreachableError for
    one that does not answer.
    """
    from filelock import FileLock

    uri = tracking_uri()
    database = _database(uri)
    _check_database(database, uri)
    mlflow = import_mlflow()
    lock = root() / ".dvc" / "tmp" / "mlflow-store.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):  # two processes that make the database at once would break it
            _make_database(database, mlflow)
            mlflow.set_tracking_uri(uri)
            client = mlflow.MlflowClient()
            return Store(client, _chosen_experiment(client, uri) or _experiment_id(client, experiment, uri))
    except (UserError, UnreachableError):
        raise
    except Exception as error:  # MLflow raises many kinds: its own, SQLAlchemy's, requests'
        if is_passing(error) and (is_remote(uri) or any(words in str(error) for words in LOCKED)):
            raise UnreachableError(f"{without_password(uri)}: {short(error)}") from None
        raise UserError(f"the MLflow store {without_password(uri)} cannot be used: {error}") from None


def _database(uri: str) -> Path | None:
    """The file of an SQLite store."""
    return Path(uri.removeprefix("sqlite:///").partition("?")[0]) if uri.startswith("sqlite:///") else None


def _check_database(path: Path | None, uri: str) -> None:
    """Raises UserError for an SQLite file that cannot be opened, which MLflow would try for minutes."""
    if path is None:
        return
    opened = path if path.exists() else _unfinished(path)
    try:
        with closing(sqlite3.connect(opened, timeout=0)) as database:
            database.execute("PRAGMA user_version")
    except sqlite3.Error as error:
        if not any(words in str(error) for words in LOCKED):
            raise UserError(f"the MLflow store {uri} cannot be used: {error}") from None
    finally:
        _unfinished(path).unlink(missing_ok=True)


def _make_database(path: Path | None, mlflow: Any) -> None:
    """A new SQLite store, whole or not at all: half of MLflow's tables are a store that never opens again."""
    if path is None or path.exists():
        return
    unfinished = _unfinished(path)
    try:
        mlflow.MlflowClient(f"sqlite:///{unfinished}").search_experiments(max_results=1)
        if not path.exists():  # a UI may have made one meanwhile, and is using it
            os.replace(unfinished, path)
    except Exception as error:
        if not type(error).__module__.startswith(LIBRARIES):
            raise
        # a file that opens and then cannot be filled: MLflow tries again, and hides the disk's own reason
        raise UnreachableError(f"{path} cannot be made ({files.room(path.parent)}): {short(error)}") from None
    finally:
        for left in path.parent.glob(f"{unfinished.name}*"):  # SQLite's own journal too
            left.unlink(missing_ok=True)


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def is_remote(uri: str) -> bool:
    """Whether others than this process have to answer."""
    return not uri.startswith(("sqlite:", "file:", "/"))


def is_passing(error: Exception) -> bool:
    """Whether the same call may succeed later: all but what MLflow says is wrong with the call itself."""
    code = getattr(error, "error_code", None)
    if code is not None:
        return code not in (*REFUSED_CODES, *GONE_CODES)
    return isinstance(error, OSError) or type(error).__module__.startswith(LIBRARIES)


def short(error: BaseException) -> str:
    """The first sentence of what MLflow and its libraries pile up."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def import_mlflow() -> Any:
    """mlflow, without its notes on creating the database, and without its own minutes of trying again."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", RETRIES)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", TIMEOUT_SECONDS)
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # a traceback for a locked database
    import mlflow

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    return mlflow


def tracking_uri() -> str:
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


def without_password(uri: str) -> str:
    parsed = urlparse(uri)
    return uri.replace(f":{parsed.password}@", ":***@") if parsed.password else uri
