"""The house as the design draws it: who may import whom, and files that must agree with each other."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from closure import ROOT, closure, imports
from packaging.requirements import Requirement

from pipeline import config

CODE = sorted((ROOT / "pipeline").rglob("*.py"))
GROUND = {"errors", "files"}
ALLOWED = {  # room -> rooms it may import, besides itself and the ground floor
    "errors": set(),
    "files": set(),
    "engine": set(),
    "memory": {"engine"},
    "data": set(),
    "models": set(),
    "metrics": set(),
    "figures": set(),
    "config": set(),
    "provenance": {"config"},
    "tracking": {"provenance"},
    "resume": {"config", "engine"},
    "custom": {"data", "engine"},
    "stages": {
        "config",
        "provenance",
        "tracking",
        "resume",
        "figures",
        "metrics",
        "models",
        "data",
        "memory",
        "engine",
    },
    "__main__": {"config", "provenance", "tracking", "resume", "stages"},
    "__init__": set(),
}
ONLY_HERE = {  # third-party package -> files that may import it
    "omegaconf": {"config.py"},
    "mlflow": {f"tracking/{name}.py" for name in ("delivery", "model", "project", "run", "store", "system")},
    "matplotlib": {"figures.py"},
    "torchvision": {"models.py", "stages/prepare.py"},
    "torchmetrics": {"metrics.py"},
    "rich": {"stages/clean.py", "stages/progress.py"},
}


def room(path: Path) -> str:
    return path.relative_to(ROOT / "pipeline").parts[0].removesuffix(".py")


def packages(path: Path) -> set[str]:
    """First names of everything a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    own = room(path)
    used = {name.split(".")[1] for name in imports(path) if "." in name}
    ground = set() if own == "engine" else GROUND
    assert used - {own} - ground <= ALLOWED[own]


def test_the_engine_needs_torch_alone() -> None:
    for path in (ROOT / "pipeline" / "engine").glob("*.py"):
        assert packages(path) - set(sys.stdlib_module_names) <= {"torch", "pipeline"}, path


@pytest.mark.parametrize("package", ONLY_HERE)
def test_a_package_is_known_in_one_place(package: str) -> None:
    users = {str(path.relative_to(ROOT / "pipeline")) for path in CODE if package in packages(path)}
    assert users == ONLY_HERE[package]


def test_there_is_no_utils() -> None:
    assert not [path for path in CODE if path.stem in ("utils", "util", "helpers", "common", "misc")]


STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stages_code_deps_are_its_import_closure(stage: str) -> None:
    listed = {dep for dep in STAGES[stage]["deps"] if dep.endswith(".py")}
    assert listed == closure(f"pipeline.stages.{stage}")
    assert "requirements.txt" in STAGES[stage]["deps"]
    assert STAGES[stage]["cmd"] == f"exec python -m pipeline.stages.{stage}"


def test_a_stages_outputs_are_what_the_next_one_depends_on() -> None:
    made = {
        name: set(stage.get("outs", [])) | set(stage.get("metrics", [])) for name, stage in STAGES.items()
    }
    assert made["prepare"] < set(STAGES["train"]["deps"])
    assert made["prepare"] | made["train"] - {"reports/training.csv"} < set(STAGES["evaluate"]["deps"])


def test_the_what_half_of_params_and_nothing_else_trains_again() -> None:
    assert STAGES["train"]["params"] == config.sections("what")
    assert set(STAGES["prepare"]["params"]) == {"seed", "data"}
    assert "params" not in STAGES["evaluate"]


def test_mlproject_calls_commands_that_exist() -> None:
    project = yaml.safe_load((ROOT / "MLproject").read_text())
    assert set(project["entry_points"]) == {"main", "plan", "prepare", "train", "evaluate"}
    source = (ROOT / "pipeline" / "__main__.py").read_text()
    known = (*STAGES, *re.findall(r'add_parser\(\s*"([\w-]+)"', source))
    for entry in project["entry_points"].values():
        assert re.match(r"python -m pipeline ([\w-]+)", entry["command"])[1] in known
    assert project["conda_env"] == "conda.yaml"


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    found = [re.match(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in lines]
    return {match[1].lower(): match[2] for match in found if match}


def direct() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in project["dependencies"]]


def test_the_lock_satisfies_what_is_declared() -> None:
    lock = pins("requirements.txt")
    for requirement in direct():
        assert requirement.specifier.contains(lock[requirement.name]), requirement
    assert (lock["torch"], lock["torchvision"], lock["mlflow"]) == ("2.14.1", "0.29.1", "3.17.2")


def test_the_test_tools_lock_agrees_with_the_runtimes() -> None:
    runtime, tools = pins("requirements.txt"), pins("requirements-dev.txt")
    assert {name: tools.get(name) for name in runtime} == runtime


def test_conda_yaml_pins_the_locks_versions() -> None:
    environment = yaml.safe_load((ROOT / "conda.yaml").read_text())
    python, pip, listed = environment["dependencies"]
    assert (python, pip) == ("python=3.11", "pip")
    assert listed["pip"][0] == "-r requirements.txt"
    lock = pins("requirements.txt")
    assert listed["pip"][1:] == [f"{item.name}=={lock[item.name]}" for item in direct()]


def test_the_readme_names_every_key_and_every_top_level_file() -> None:
    readme = (ROOT / "README.md").read_text()
    for dotted in config.flatten(config.load()):
        assert f"`{dotted.split('.')[-1]}`" in readme, dotted
    for name in ("params.yaml", "dvc.yaml", "MLproject", "conda.yaml", "pyproject.toml", "Makefile", "docs/"):
        assert name in readme
