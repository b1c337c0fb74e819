"""Stage evaluate: the saved model on the test split, in float32, from the files that train left."""

import csv
import sys
from pathlib import Path
from typing import Any

from pipeline import figures, files, metrics, models, tracking
from pipeline.config import Params
from pipeline.data import prepared
from pipeline.data.loader import WindowLoader
from pipeline.stages.device import choose_device
from pipeline.stages.guard import inputs_unchanged, run_stage

REPORTS = Path("reports")
BATCH = 16  # images at a time; without gradients they take little


def evaluate(params: Params) -> None:
    files.check_writable(REPORTS)
    with inputs_unchanged("evaluate"):
        data = prepared.open_prepared()
        loaded = models.load_model(own_code=params.model.name)
        model = loaded.model.to(choose_device(params.execution.device))
        windows = WindowLoader(data.splits["test"], BATCH, seed=0).in_order()
        result = metrics.evaluate(metrics.logits(model, windows, loaded.transform), loaded.classes)
        write_reports(result, loaded.classes)
        log_to_training_run(params, result, loaded.classes)
    print("  ".join(f"test/{name} {value:.4f}" for name, value in result.scalars.items()))


def write_reports(result: metrics.Evaluation, classes: list[str]) -> None:
    """test.json for `dvc metrics`, and tables for `dvc plots` and for reading."""
    files.write_json(REPORTS / "test.json", {"test": result.scalars})
    _write_csv(REPORTS / "classes.csv", result.per_class)
    pairs = [
        {"actual": classes[row], "predicted": classes[column]}
        for row, counts in enumerate(result.confusion)
        for column, count in enumerate(counts)
        for _ in range(count)
    ]
    _write_csv(REPORTS / "confusion.csv", pairs)


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with files.whole(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def log_to_training_run(params: Params, result: metrics.Evaluation, classes: list[str]) -> None:
    """Adds the test metrics to the run that trained this model, at its last step."""
    step = tracking.read_reference()["step"]
    with tracking.evaluation_run(params.tracking.experiment) as run:
        if run is not None:
            log_scores(run, result, classes, step)


def log_scores(run: tracking.Run, result: metrics.Evaluation, classes: list[str], step: int) -> None:
    run.metrics({f"test/{name}": value for name, value in result.scalars.items()}, step)
    for name in ("test.json", "classes.csv", "confusion.csv"):
        run.file(REPORTS / name)
    figure = figures.confusion_matrix(result.confusion, classes)
    run.figure(figure, "figures/confusion_matrix.png")
    figures.close(figure)
    headline = f"**test/accuracy {result.scalars['accuracy']:.4f}**"
    before = [line for line in run.description.splitlines() if not line.startswith("**test/accuracy")]
    run.describe("\n".join([headline, "", *before]).replace("\n\n\n", "\n\n"))


if __name__ == "__main__":
    sys.exit(run_stage("evaluate", evaluate))
