"""Ray programs are distinguished from other scripts by their source."""

from pathlib import Path

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import UsageError
from ray_on_ecs.run.program.source import driver_reason, first_start, with_driver
from tests.settings import parse

TRAINER = "import ray\nfrom ray.train.torch import TorchTrainer\nTorchTrainer(print).fit()\n"


@pytest.mark.parametrize(
    ("source", "call"),
    [
        (TRAINER, "s.py:3 calls TorchTrainer"),
        ("import ray.train.torch\nray.train.torch.TorchTrainer(print)", "s.py:2 calls TorchTrainer"),
        ("from ray import tune\ntune.Tuner(print).fit()", "s.py:2 calls Tuner"),
        ("from ray import tune\ntune.run(print)", "s.py:2 calls tune.run"),
        (
            "def main():\n    from ray.train.xgboost import XGBoostTrainer\n    XGBoostTrainer()",
            "s.py:3 calls XGBoostTrainer",
        ),
        ("from ray import tune\nx = tune.Tuner(print)\ntune.run(print)", "s.py:2 calls Tuner"),
        ("import ray\nray.init()", None),  # a script may join the cluster on every worker
        ("import subprocess\nsubprocess.run([])", None),
        ("from lightning import Trainer\nTrainer().fit(1)", None),
        ("from transformers import TorchTrainer\nTorchTrainer()", None),  # not Ray's
        ("import ray\nfrom optuna import tuners\ntuners.run(1)", None),
        ("print 'Python 2'", None),
        ("", None),
    ],
)
def test_first_call_of_trainer_or_tuner_is_named(source: str, call: str | None, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(source)
    assert first_start(tmp_path / "s.py") == call


def test_binary_file_is_not_a_ray_program(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_bytes(b"\x00\xff\xfe")
    assert first_start(tmp_path / "s.py") is None
    assert first_start(tmp_path / "missing.py") is None


def config(folder: Path, *flags: str) -> RunConfig:
    return parse([f"--working-dir={folder}", *flags], {})


@pytest.mark.parametrize("flags", [["s.py"], ["-m", "s"], ["-m", "package"], ["-m", "package.s"]])
def test_ray_program_implies_driver_mode(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for name in ("s.py", "package/__main__.py", "package/s.py"):
        (tmp_path / name).write_text(TRAINER)
    assert with_driver(config(tmp_path, *flags)).driver


@pytest.mark.parametrize("flags", [["--no-driver", "s.py"], ["--mpi", "s.py"], ["--no-python", "s.py"]])
def test_settings_override_the_source(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(TRAINER)
    assert driver_reason(config(tmp_path, *flags)) is None
    assert not with_driver(config(tmp_path, *flags)).driver


def test_number_of_workers_is_refused_with_reason(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(TRAINER)
    line = r"--num-workers: leave it out; a Ray program sets .* \(s.py:3 calls TorchTrainer: .*--no-driver"
    with pytest.raises(UsageError, match=line):
        with_driver(config(tmp_path, "--num-workers=2", "s.py"))


@pytest.mark.parametrize(
    "flags", [["--num-workers=2"], ["--nnodes=2"], ["--mpi"], ["--per-node"], ["--no-python"], ["--no-driver"]]
)
def test_settings_without_effect_are_refused(flags: list[str]) -> None:
    with pytest.raises(UsageError, match="leave it out; a Ray program"):
        parse(["--driver", *flags, "s.py"], {})


def test_num_workers_of_the_environment_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ON_ECS_NUM_WORKERS", "4")
    assert parse(["--driver", "s.py"]).workers is None
