"""Advice on a script's error, by the code and the error's line."""

from pathlib import Path

import pytest

from ray_on_ecs.run.advice import advice

PACKAGE = "name its package in a file for --requirements"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with code."""
    for name in ("mylib/x.py", "src/pkg/__init__.py", "a/b/deep.py", "single.py", "datasets.py", "wandb/run.json"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("'flash_attn'", PACKAGE),
        ("nosuch", PACKAGE),
        ("'wandb'", PACKAGE),  # a folder without code
        ("'mylib'", "mylib is code in the folder itself: --env PYTHONPATH=. finds it"),
        ("'single'", "single is code in the folder itself: --env PYTHONPATH=. finds it"),
        ("'pkg'", "pkg is code in src: --env PYTHONPATH=src finds it"),
        ("pkg", "pkg is code in src: --env PYTHONPATH=src finds it"),
        ("'deep'", "deep is code in a/b: --env PYTHONPATH=a/b finds it"),
        ("'mylib.y'", "mylib in the folder of the code does not have it; correct the name mylib.y"),
        ("'pkg.y.z'", "pkg in src of the code does not have it; correct the name pkg.y.z"),
        (
            "'torchao.dtypes.nf4tensor'",
            "torchao is installed, and another version of it may have the module: name that in a file for "
            "--requirements",
        ),
        (
            "'datasets.load'; 'datasets' is not a package",
            "datasets in the folder of the code hides the package datasets; rename it",
        ),
    ],
)
def test_missing_module_has_the_way_to_it(name: str, expected: str, folder: Path) -> None:
    assert advice(f"ModuleNotFoundError: No module named {name}", folder, {}) == expected


def test_import_path_of_the_user_is_kept(folder: Path) -> None:
    variables = {"PYTHONPATH": "src"}
    assert "--env PYTHONPATH=.:src finds it" in advice("No module named 'mylib'", folder, variables)
    for given in ("src", "./src/", "lib:src"):
        assert "PYTHONPATH" not in advice("No module named 'pkg'", folder, {"PYTHONPATH": given})


@pytest.mark.parametrize("names", ["num_cpus and num_gpus", "resources", "object_store_memory", "_system_config"])
def test_argument_that_ray_refuses_is_named(names: str, tmp_path: Path) -> None:
    text = f"ValueError: When connecting to an existing cluster, {names} must not be provided."
    line = f"leave {names} out of ray.init(), because a Ray program joins the cluster of its run"
    assert advice(text, tmp_path, {}) == line


def test_other_error_has_no_advice(folder: Path) -> None:
    assert advice("KeyError: 'mylib'", folder, {}) == ""
