"""A torch model for MLflow: exported here, without a server; sent as MLflow's own log_model would."""

import warnings
from pathlib import Path
from typing import Any

from pipeline import provenance
from pipeline.tracking.store import import_mlflow

NAME = "model"  # under it the run's page shows it
WANTED = ("torch", "torchvision", "numpy")


def export_model(model: Any, example: Any, target: Path) -> None:
    """Writes the torch model (on the CPU, in evaluation mode) into the folder `target`.

    example: an input, as numpy array. It is stored as an exported program, which loads without this project;
    a model that cannot be exported is stored as a pickle, which needs its code.
    """
    import shutil

    mlflow = import_mlflow()
    requirements = [line for line in provenance.packages().split() if line.split("==")[0] in WANTED]
    arguments = {"path": str(target), "pip_requirements": requirements, "input_example": example}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            mlflow.pytorch.save_model(model, **arguments)
        except Exception as error:
            print(f"the model cannot be exported ({str(error).splitlines()[0]:.200}): logged as pickle")
            shutil.rmtree(target, ignore_errors=True)
            mlflow.pytorch.save_model(model, serialization_format="pickle", **arguments)


def deliver_model(client: Any, run_id: str, experiment_id: str, folder: Path) -> None:
    """The steps of mlflow.models.Model.log (3.17): a logged model, its files, its place in the run."""
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model

    logged = _made_before(client, run_id, experiment_id) or client.create_logged_model(
        experiment_id, name=NAME, source_run_id=run_id
    )
    description = Model.load(str(folder))
    description.run_id, description.model_id = run_id, logged.model_id
    description.artifact_path = logged.artifact_location
    description.save(str(folder / "MLmodel"))
    client.log_model_artifacts(logged.model_id, str(folder))
    client.finalize_logged_model(logged.model_id, status="READY")
    client.log_outputs(run_id, models=[LoggedModelOutput(logged.model_id, step=0)])


def _made_before(client: Any, run_id: str, experiment_id: str) -> Any:
    """That of a delivery which did not come to its end."""
    found = client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'", max_results=1)
    return found[0] if found else None
