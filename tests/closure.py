"""What a module of this project imports, read from the source: the import closure of a DVC stage."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def closure(module: str) -> set[str]:
    """Paths, relative to the project, of the module and of all modules of `pipeline` that it imports.

    Imports inside functions count; so do the packages on the way (their __init__.py runs).
    """
    found: set[str] = set()
    waiting = {module}
    while waiting:
        path = path_of(waiting.pop())
        if path is None or str(path) in found:
            continue
        found.add(str(path))
        waiting |= imports(ROOT / path)
        waiting |= {".".join(parent.parts) for parent in path.parents if parent.parts}
    return found


def path_of(module: str) -> Path | None:
    base = Path(*module.split("."))
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if (ROOT / path).is_file():
            return path
    return None


def imports(path: Path) -> set[str]:
    """Dotted names of `pipeline` that a file imports; `from package import name` may mean a module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: a relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "pipeline" and path_of(name)}
