"""Ray programs are distinguished from other scripts by their source."""

import os
from pathlib import Path

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import UsageError
from ray_on_ecs.run.program.source import Source, driver_reason, first_start, source_of, with_driver
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
        ("import ray\nray.init()", "s.py:2 calls ray.init"),
        ("import ray\n\n@ray.remote\ndef f(): pass", "s.py:3 calls ray.remote"),
        ("import ray\n@ray.remote(num_cpus=2)\nclass A: pass", "s.py:2 calls ray.remote"),
        ("import ray\nf = ray.remote(print)", "s.py:2 calls ray.remote"),
        ("from ray import remote\n@remote\ndef f(): pass", "s.py:2 calls ray.remote"),
        ("import ray as r\nif not r.is_initialized():\n  r.init()", "s.py:3 calls ray.init"),
        ("import ray\nds = ray.data.read_csv('x').map(f)", "s.py:2 calls ray.data.read_csv"),
        ("from ray.data import range\nrange(5)", "s.py:2 calls ray.data.range"),
        ("from ray import data\ndata.from_items([])", "s.py:2 calls ray.data.from_items"),
        (
            "from ray.rllib.algorithms.ppo import PPOConfig\nPPOConfig()",
            "s.py:2 calls ray.rllib.algorithms.ppo.PPOConfig",
        ),
        (
            "import ray\nray.init()\nfrom ray.train.torch import TorchTrainer\nTorchTrainer()",
            "s.py:4 calls TorchTrainer",
        ),
        *(
            (f"import ray\n{line}\nray.init()", None)  # a script for every worker may join the cluster
            for line in (
                "import torch.distributed as dist",
                "from torch.distributed import all_reduce",
                "from torch.nn.parallel import DistributedDataParallel as Wrapped",
                "torch.nn.parallel.DistributedDataParallel(model)",
                "from accelerate import Accelerator",
                "import lightning as L",
                "from transformers import Trainer",
                "from mpi4py import MPI",
                "import deepspeed",
                "import os; rank = int(os.environ['RANK'])",
                "import os; rank = os.getenv('LOCAL_RANK', '0')",
            )
        ),
        ("import ray\nprint(ray.__version__)", None),
        ("import os\nos.init()", None),
        ("from keras_tuner import Tuner\nTuner('ray')", None),
        ("import subprocess\nsubprocess.run([])", None),
        ("from lightning import Trainer\nTrainer().fit(1)", None),
        ("from transformers import TorchTrainer\nTorchTrainer()", None),  # not Ray's
        ("import ray\nfrom optuna import tuners\ntuners.run(1)", None),
        ("", None),
    ],
)
def test_first_call_of_trainer_or_tuner_is_named(source: str, call: str | None, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(source)
    assert first_start(Source(tmp_path / "s.py")) == call


@pytest.mark.parametrize("content", [b"\x00\xff\xfe", b"print 'Python 2'", b"+".join(5000 * [b"1"]), None])
def test_file_that_can_not_be_read_has_no_source(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "s.py").write_bytes(content)
    assert source_of(config(tmp_path, "s.py")) is None


def config(folder: Path, *flags: str) -> RunConfig:
    return parse([f"--working-dir={folder}", *flags], {})


@pytest.mark.parametrize("flags", [["s.py"], ["-m", "s"], ["-m", "package"], ["-m", "package.s"]])
def test_ray_program_implies_driver_mode(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for name in ("s.py", "package/__main__.py", "package/s.py"):
        (tmp_path / name).write_text(TRAINER)
    settings = config(tmp_path, *flags)
    reason = driver_reason(settings)
    assert reason
    assert with_driver(settings, reason).driver


@pytest.mark.parametrize("flag", ["--no-driver", "--driver", "--mpi", "--no-python"])
def test_settings_override_the_source(flag: str, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(TRAINER)
    assert driver_reason(config(tmp_path, flag, "s.py")) is None


@pytest.mark.parametrize(
    ("flags", "file"),
    [
        ([], "pk/drv.py"),
        ([], "pk/drv/__main__.py"),
        ([], "src/pk/drv.py"),  # an installed package: -e . with a src layout
        ([], "src/pk/drv/__main__.py"),
        (["--env", "PYTHONPATH=lib"], "lib/pk/drv.py"),
        (["--env", "PYTHONPATH=./a/b/"], "a/b/pk/drv.py"),
        (["--env", "PYTHONPATH=a:lib"], "lib/pk/drv/__main__.py"),
    ],
)
def test_source_of_a_module_is_found(tmp_path: Path, flags: list[str], file: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("import ray\nray.init()\n")
    assert "calls ray.init" in (driver_reason(config(tmp_path, *flags, "-m", "pk.drv")) or "")
    assert driver_reason(config(tmp_path, *flags, "-m", "pk.other")) is None


def test_source_is_of_the_file_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("print(1)\n")
    (tmp_path / "train.py").write_text("import ray\nray.init()\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "other.py").write_text("import ray\nray.init()\n")
    assert driver_reason(config(tmp_path, "train")) is None
    assert driver_reason(config(tmp_path, "other.py")) is None
    assert "calls ray.init" in (driver_reason(config(tmp_path, "-m", "train")) or "")


def test_number_of_workers_is_refused_with_reason(tmp_path: Path) -> None:
    line = r"--num-workers: leave it out; a Ray program sets .* \(s.py:3 calls TorchTrainer\)"
    with pytest.raises(UsageError, match=line):
        with_driver(config(tmp_path, "--num-workers=2", "s.py"), "s.py:3 calls TorchTrainer")


@pytest.mark.parametrize(
    "flags", [["--num-workers=2"], ["--nnodes=2"], ["--mpi"], ["--per-node"], ["--no-python"], ["--no-driver"]]
)
def test_settings_without_effect_are_refused(flags: list[str]) -> None:
    with pytest.raises(UsageError, match="leave it out; a Ray program"):
        parse(["--driver", *flags, "s.py"], {})


@pytest.mark.parametrize(("device", "kept"), [("cuda", "auto"), ("cpu", "cpu")])
def test_of_the_environment_only_cpu_is_kept(device: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ON_ECS_NUM_WORKERS", "4")
    monkeypatch.setenv("RAY_ON_ECS_DEVICE", device)
    parsed = parse(["--driver", "s.py"], os.environ)
    assert (parsed.workers, parsed.device) == (None, kept)
