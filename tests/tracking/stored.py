"""What stands in an MLflow store, read without the project's code."""

import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.tracking.journal import EVENTS, journals, read_delivered, write_delivered
from pipeline.tracking.store import import_mlflow

EXPERIMENT = "tests"
COUNTS = "SELECT COUNT(*), COUNT(DISTINCT key || '/' || step) FROM metrics WHERE run_uuid = ?"


@dataclass
class Store:
    """The project's folder, and the database in it."""

    folder: Path

    @property
    def database(self) -> Path:
        return self.folder / "mlflow.db"

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.database}"

    @property
    def client(self) -> Any:
        return import_mlflow().MlflowClient(self.uri)

    def runs(self) -> list[Any]:
        client = self.client
        found: list[Any] = client.search_runs([e.experiment_id for e in client.search_experiments()])
        return found

    def run(self) -> Any:
        """The one run."""
        (found,) = self.runs()
        return found

    def query(self, statement: str, *values: Any) -> list[Any]:
        with sqlite3.connect(self.database, timeout=30) as connection:
            return connection.execute(statement, values).fetchall()

    def rows(self, run_id: str) -> int:
        """The metric rows of a run, of which no two are of one key and step."""
        [(count, distinct)] = self.query(COUNTS, run_id)
        assert count == distinct, f"{count - distinct} of {count} rows stand twice"
        return int(count)


def end_couriers(folder: Path) -> None:
    """A courier whose store never answers is a thread that would go on into the next test."""
    left = [thread for thread in threading.enumerate() if thread.name == "mlflow"]
    if left:
        for journal in journals(folder):
            size = (journal / EVENTS).stat().st_size
            write_delivered(journal, read_delivered(journal) | {"bytes": size})
    for thread in left:
        thread.join(30)
        assert not thread.is_alive()
