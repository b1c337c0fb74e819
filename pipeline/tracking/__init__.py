"""One row of the MLflow UI is one experiment. The only room that imports mlflow.

`train` starts a run, or adopts the one that `mlflow run` made; `evaluate` adds to it. Nothing is sent from
where training happens: a run writes to its journal on the disk, and a thread takes that to MLflow.

    journal    what a run has to say, on the disk, in order
    delivery   from a journal to MLflow, each event once
    courier    the thread that delivers while the run goes on
    run        what stages write to: a training's run, or that of a trained model
    model      a torch model for MLflow
    system     MLflow's system metrics
    store      where runs go, and whether it answers
    project    the row of `mlflow run`, and the UI

mlflow is imported where it is used: it takes two seconds.
"""

from pipeline.tracking.delivery import deliver_all
from pipeline.tracking.journal import Journal, waiting_events
from pipeline.tracking.project import note_project_run, serve_ui
from pipeline.tracking.run import (
    RUN_FILE,
    Run,
    evaluation_run,
    read_reference,
    save_reference,
    training_run,
)
from pipeline.tracking.store import root

__all__ = [
    "RUN_FILE",
    "Journal",
    "Run",
    "deliver_all",
    "evaluation_run",
    "note_project_run",
    "read_reference",
    "root",
    "save_reference",
    "serve_ui",
    "training_run",
    "waiting_events",
]
