"""A local MLflow store for each test: made once, as that takes seconds, and copied."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from stored import Store, end_couriers

from pipeline.tracking.store import import_mlflow


@pytest.fixture(scope="session")
def fresh_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    import_mlflow().MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(tmp_path: Path, fresh_database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Set as the tracking store; the project's folder is the test's temporary one."""
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    shutil.copyfile(fresh_database, tmp_path / "mlflow.db")
    made = Store(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", made.uri)
    yield made
    end_couriers(tmp_path)
