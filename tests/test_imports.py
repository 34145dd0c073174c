"""Tests, benchmarks and drills import in one direction: benchmarks and drills use the tests' helpers."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def imported_packages(file: Path) -> set[str]:
    """The top-level names that a file imports."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names = plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(("package", "forbidden"), [("bench", "drills"), ("drills", "bench")])
def test_benchmarks_and_drills_do_not_import_each_other(package: str, forbidden: str) -> None:
    files = list((ROOT / package).glob("*.py"))
    assert files, f"{package}/ has moved"
    for file in files:
        assert forbidden not in imported_packages(file), f"{file.relative_to(ROOT)} imports {forbidden}"


def test_other_tests_import_no_benchmarks_or_drills() -> None:
    for file in (ROOT / "tests").rglob("*.py"):
        folder = file.relative_to(ROOT / "tests").parts[0]
        forbidden = {"bench", "drills"} - {folder}
        assert not forbidden & imported_packages(file), f"{file.relative_to(ROOT)}: share the code in tests/ instead"


def test_package_imports_only_the_standard_library() -> None:
    program = "import sys; before = set(sys.modules); import ray_on_ecs; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    packages = {name.partition(".")[0] for name in done.stdout.split()}
    assert packages - sys.stdlib_module_names == {"ray_on_ecs"}
