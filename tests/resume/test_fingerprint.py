from typing import Any

from pipeline import config
from pipeline.resume.fingerprint import differences, fingerprint


def inputs(**changes: Any) -> dict[str, dict[str, Any]]:
    made = {
        "data": {"train_images.npy": "aa"},
        "code": {"pipeline/models.py": "bb", "requirements.txt": "cc"},
        "what": {"optimizer.lr": 0.005, "model.args": {"width": 2}, "model.freeze": ["a.*"]},
    }
    for name, value in changes.items():
        made[name] = {**made[name], **value}
    return made


def test_the_same_inputs_have_one_fingerprint_in_whatever_order() -> None:
    reordered = {part: dict(reversed(values.items())) for part, values in reversed(inputs().items())}
    assert fingerprint(reordered) == fingerprint(inputs())
    assert len(fingerprint(inputs())) == 16


def test_each_input_counts_and_what_differs_is_named() -> None:
    now = inputs(
        data={"train_images.npy": "zz"},
        code={"pipeline/models.py": "zz", "pipeline/new.py": "dd"},
        what={"optimizer.lr": 0.001},
    )
    assert differences(inputs(), now) == [
        "train_images.npy changed",
        "pipeline/models.py changed",
        "pipeline/new.py is new",
        "optimizer.lr 0.005 -> 0.001",
    ]
    assert differences(inputs(), inputs()) == []
    for part in ("data", "code", "what"):
        assert fingerprint(inputs(**{part: now[part]})) != fingerprint(inputs())


def test_only_the_what_half_is_in_it() -> None:
    params = config.load()
    what = config.flatten(params, "what")
    assert "optimizer.lr" in what
    assert "precision" in what
    assert (
        not {"memory.budget_gib", "execution.workers", "checkpoint.keep", "tracking.experiment"} & what.keys()
    )
