"""The shape of the house: who may import whom, and how large a part may grow."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = {
    "types": 0, "messages": 0, "errors": 0, "atomic": 0, "lesson": 0, "snapshot": 0,
    "protocols": 1, "config": 1, "algorithms": 1,
    "agents": 2, "data": 2, "tools": 2, "rendering": 2, "parsing": 2, "rollout": 2, "grading": 2,
    "verifiers": 2, "store": 2, "replay": 2, "plugins": 2, "gym": 2, "metrics": 2, "alarms": 2,
    "provenance": 2, "guard": 2,
    "learning": 3, "engines": 3, "models": 3,
    "train": 4, "evaluate": 4,
    "build": 5, "rebuild": 5, "offline": 5, "cli": 5, "report": 5, "doctor": 5, "show": 5,
    "planning": 5, "viewer": 5,
    "testing": 2,
}  # fmt: skip
HEAVY = {"torch", "transformers", "vllm", "docker", "pyarrow"}
PACKAGE = sorted((ROOT / "agentrl").rglob("*.py"))


def part(path: Path) -> str:
    """The layer name that a file belongs to."""
    return path.relative_to(ROOT / "agentrl").parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Dotted names imported at run time anywhere in a file (TYPE_CHECKING blocks don't count)."""
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return names


def parts_imported(path: Path) -> set[str]:
    return {
        name.split(".")[1]
        for name in imports(path)
        if name.startswith("agentrl.") and name.split(".")[1] in LAYERS
    }


@pytest.mark.parametrize("path", PACKAGE, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_part_imports_only_what_lies_below_it(path: Path) -> None:
    mine = part(path)
    if mine in ("__init__", "__main__"):
        return
    assert mine in LAYERS, f"{path} belongs to no layer: add it to the table or move it"
    for other in parts_imported(path) - {mine}:
        assert LAYERS[other] <= LAYERS[mine], f"{mine} must not import {other}"
        if LAYERS[mine] <= 2 and mine != "testing":
            assert other != "testing", f"{mine} must not import testing"
        assert {mine, other} != {"learning", "engines"}, "learning and engines don't see each other"


@pytest.mark.parametrize("path", PACKAGE, ids=lambda p: str(p.relative_to(ROOT)))
def test_light_layers_load_no_torch(path: Path) -> None:
    if part(path) in LAYERS and LAYERS[part(path)] <= 2:
        heavy = {name.split(".")[0] for name in imports(path)} & {"torch", "vllm", "docker"}
        # TensorBoard's writer ships inside torch, and is loaded when a run opens its metrics.
        assert not heavy or part(path) == "metrics"


@pytest.mark.parametrize("folder", ["environments", "sandboxes"])
def test_plugins_import_only_the_framework(folder: str) -> None:
    own = f"agentrl_{folder}"
    for path in (ROOT / folder).rglob("*.py"):
        for name in imports(path):
            if name.startswith("agentrl"):
                assert name.startswith(("agentrl.", own)) or name == "agentrl", (path, name)
                assert not name.startswith(("agentrl.learning", "agentrl.engines", "agentrl.build"))


def test_importing_agentrl_loads_nothing_heavy() -> None:
    code = f"import sys, agentrl; print(sorted({HEAVY!r} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("path", PACKAGE, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 450, f"{path} is too long for one sitting"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 70, f"{path}:{node.lineno} {node.name} has {length} lines"
