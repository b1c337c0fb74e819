from pathlib import Path

import pytest

from pipeline import config
from pipeline.errors import UserError

TEXT = Path("params.yaml").read_text()


def with_line(old: str, new: str) -> str:
    """params.yaml with the one line that begins with `old` replaced."""
    lines = TEXT.splitlines()
    found = [index for index, line in enumerate(lines) if line.strip().startswith(old)]
    assert len(found) == 1, old
    indent = len(lines[found[0]]) - len(lines[found[0]].lstrip())
    lines[found[0]] = " " * indent + new
    return "\n".join(lines)


def problems(text: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        config.parse(text)
    head, *rest = str(caught.value).splitlines()
    assert head == f"params.yaml: {len(rest)} problem{'s' if len(rest) > 1 else ''}"
    return [line.strip() for line in rest]


def test_the_shipped_file_is_valid_and_complete() -> None:
    flat = config.flatten(config.load())
    assert flat["optimizer.lr"] == 0.005
    assert flat["precision"] == "amp_fp16"
    assert set(flat) == set(config.raw_values(TEXT))


def test_the_two_halves_are_those_of_the_files_banners() -> None:
    upper, lower = TEXT.split("# ==== HOW")
    assert upper.startswith("# Every knob")
    assert list(dict.fromkeys(key.split(".")[0] for key in config.raw_values(upper))) == config.sections(
        "what"
    )
    assert list(
        dict.fromkeys(key.split(".")[0] for key in config.raw_values("# " + lower))
    ) == config.sections("how")
    flat = config.load()
    assert config.flatten(flat) == config.flatten(flat, "what") | config.flatten(flat, "how")


def test_the_resolved_yaml_says_the_same_again() -> None:
    params = config.load()
    assert config.parse(config.to_yaml(params)) == params


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("lr:", "lrr: 0.1", "optimizer.lrr: unknown; did you mean optimizer.lr?"),
        ("epochs:", "epoch: 3", "train.epoch: unknown; did you mean train.epochs?"),
        ("precision:", "precision: 16-mixed", "precision 16-mixed: here amp_fp16"),
        ("precision:", "precision: bf16", "precision bf16: here amp_bf16"),
        ("precision:", "precision: 32", "precision 32: here fp32"),
        ("device:", "device: gpu", "execution.device gpu: here cuda"),
        ("epochs:", "epochs: abc", "train.epochs: 'abc' is not possible; allowed: a whole number >= 1"),
        ("epochs:", "epochs: 2.5", "train.epochs: 2.5 is not possible; allowed: a whole number >= 1"),
        ("epochs:", "epochs:", "train.epochs: is empty; allowed: a whole number >= 1"),
        ("epochs:", "epochs: true", "train.epochs: True is not possible; allowed: a whole number >= 1"),
        (
            "micro_batch_size:",
            "micro_batch_size: 0",
            "batch.micro_batch_size: 0 is not possible; allowed: a whole number >= 1",
        ),
        (
            "momentum:",
            "momentum: 1.0",
            "optimizer.momentum: 1.0 is not possible; allowed: a number >= 0 and < 1",
        ),
        ("lr:", "lr: .inf", "optimizer.lr: inf is not possible; allowed: a number > 0"),
        ("lr:", "lr: .nan", "optimizer.lr: nan is not possible; allowed: a number > 0"),
        ("log_model:", "log_model: 1", "tracking.log_model: 1 is not possible; allowed: true or false"),
        (
            "log_model:",
            "log_model: yes",
            "tracking.log_model: yes means different things to YAML readers; write true or false",
        ),
        (
            "seed:",
            "seed: 010",
            "seed: 010 means different things to YAML readers; write it without the leading zero",
        ),
        (
            "seed:",
            "seed: 1_000",
            "seed: 1_000 means different things to YAML readers; write it without the underscore",
        ),
        (
            "args:",
            "args: 3",
            "model.args: 3 is not possible; allowed: a map, {} when there is nothing to say",
        ),
        (
            "source:",
            "source: digit",
            "data.source: 'digit' is not possible; allowed: digits or package.module:function; did you",
        ),
        (
            "workers:",
            "workers: many",
            "execution.workers: 'many' is not possible; allowed: a whole number >= 0, or auto",
        ),
        (
            "save:",
            "save: package.module:function",
            "train.save: 'package.module:function' is not possible; allowed: best last",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(old: str, new: str, said: str) -> None:
    assert any(problem.startswith(said) for problem in problems(with_line(old, new)))


def test_all_problems_are_reported_at_once_and_a_misspelt_key_only_once() -> None:
    text = TEXT.replace("  lr:", "  lrr:").replace("epochs: 8", "epochs: 0")
    text = text.replace("precision: amp_fp16", "precision: fp61").replace("seed: 0", "sed: 0")
    found = problems(text)
    assert len(found) == 4
    assert [line.split(":")[0] for line in found] == ["sed", "precision", "optimizer.lrr", "train.epochs"]


def test_a_key_in_the_wrong_section_is_found_by_its_name() -> None:
    text = TEXT.replace("  epochs: 8", "  epochs: 8\n  max_grad_norm: 3")
    assert problems(text) == ["train.max_grad_norm: unknown; did you mean optimizer.max_grad_norm?"]


def test_missing_keys_and_sections_are_named() -> None:
    assert problems(with_line("seed:", "")) == ["seed: missing; add it to params.yaml"]
    assert problems(TEXT.split("tracking:")[0]) == [
        f"tracking.{key}: missing; add it to params.yaml"
        for key in ("experiment", "run_name", "log_every_steps", "log_model")
    ]
    assert "data: 3 stands where a section with keys is expected" in problems("data: 3")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected `key: value` lines"),
        ("[1, 2]", "expected `key: value` lines"),
        ("a: [", "not readable as YAML"),
        ("seed: 1\nseed: 2", "duplicate key seed"),
    ],
)
def test_what_is_no_params_file_is_one_problem(text: str, said: str) -> None:
    (only,) = problems(text)
    assert said in only


@pytest.mark.parametrize("written", ["1e-4", "0.0001", "1.0e-4", "1E-4"])
def test_scientific_notation_is_a_float(written: str) -> None:
    assert config.parse(with_line("lr:", f"lr: {written}")).optimizer.lr == 1e-4


def test_a_whole_number_is_a_float_where_a_float_belongs() -> None:
    lr = config.parse(with_line("lr:", "lr: 1")).optimizer.lr
    assert (lr, type(lr)) == (1.0, float)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ({"micro_batch_size: 16": "micro_batch_size: 65"}, "65 is more than batch.effective_batch_size, 64"),
        ({"validation_fraction: 0.15": "validation_fraction: 0.9"}, "1.05 leaves nothing to train on"),
        ({"min_scale: 1.0": "min_scale: 65537"}, "scaler.min_scale: 65537 is more than scaler.init_scale"),
        ({"experiment: tightfit": "experiment: ''"}, "tracking.experiment: is empty"),
    ],
)
def test_keys_that_contradict_each_other_are_named(pairs: dict[str, str], said: str) -> None:
    text = TEXT
    for old, new in pairs.items():
        assert old in text
        text = text.replace(old, new)
    (only,) = problems(text)
    assert said in only


def test_own_functions_are_accepted_where_they_may_stand() -> None:
    text = TEXT.replace("source: digits", "source: pipeline.custom.mine:source")
    text = text.replace("name: cross_entropy", "name: pipeline.custom.mine:loss")
    params = config.parse(text)
    assert (params.data.source, params.loss.name) == (
        "pipeline.custom.mine:source",
        "pipeline.custom.mine:loss",
    )
    assert "is not possible" in problems(TEXT.replace("source: digits", "source: 'a b:c'"))[0]


def test_nested_model_args_arrive_as_they_are() -> None:
    params = config.parse(TEXT.replace("args: {}", "args: {width: 8, stages: [1, 2]}"))
    assert params.model.args == {"width": 8, "stages": [1, 2]}


def test_a_file_that_cannot_be_read_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        config.load(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"seed: \xff")
    with pytest.raises(UserError, match="cannot be read"):
        config.load(tmp_path / "latin.yaml")
