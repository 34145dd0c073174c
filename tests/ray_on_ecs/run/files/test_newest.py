"""The name of the checkpoint from which a script restarts."""

import os
from pathlib import Path

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.run.files.newest import has_stored, newest_of_script, newest_stored
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import KeptFile, Snapshot, write_snapshot


@pytest.mark.parametrize("folder", ["checkpoints", "ck", "a/b", ".", "step-000000001", "my step-1"])
def test_newest_complete_checkpoint_is_named(tmp_path: Path, folder: str) -> None:
    storage = RunStorage.open(str(tmp_path), "run")
    assert newest_of_script(storage) is None
    for seconds, step in enumerate((20, 9, 30), start=1_700_000_000):
        storage.write(f"{folder}/step-{step:09d}/__0_0.distcp", b"weights")
        if step < 30:  # the last one has no manifest yet
            storage.write(f"{folder}/step-{step:09d}/checkpoint.json", b"{}")
            os.utime(tmp_path / "run" / folder / f"step-{step:09d}" / "checkpoint.json", (seconds, seconds))
    newest = newest_of_script(storage)
    assert newest
    assert (newest.name, newest.written_at.timestamp()) == (
        f"{folder}/step-000000020".removeprefix("./"),
        1_700_000_000,
    )


@pytest.mark.parametrize(
    "steps",
    [
        ["000000020", "000000020-1"],
        ["000000020-1", "000000020-2"],
        ["000000020-9", "000000020-10"],
        ["000000009-1", "000000020"],
        ["999999999", "1000000000"],
        ["999999999-3", "1000000000-2"],
        ["00000020", "000000003"],
        ["000000040x", "000000003"],
        ["000000040-", "000000003"],
        ["000000040-1-1", "000000003"],
        ["٠٠٠٠٠٠٠٤٠", "000000003"],
        ["9" * 200, "000000003"],
    ],
)
def test_last_checkpoint_of_a_folder_is_the_newest(tmp_path: Path, steps: list[str]) -> None:
    storage = RunStorage.open(str(tmp_path), "run")
    for step in steps:
        storage.write(f"ck/step-{step}/checkpoint.json", b"{}")
    storage.write("ck/step-000000050/below/checkpoint.json", b"{}")
    newest = newest_of_script(storage)
    assert newest
    assert newest.name == f"ck/step-{steps[1]}"


@pytest.mark.parametrize(
    ("name", "is_stored"),
    [("state.txt", True), ("last.pt", True), ("train.log", False), ("events.out.tfevents.1", False)],
)
@pytest.mark.parametrize("driver", [False, True])
def test_text_files_may_be_the_state_of_a_script(tmp_path: Path, name: str, is_stored: bool, driver: bool) -> None:
    storage, config = RunStorage.open(str(tmp_path / "storage"), "run"), RunConfig(driver=driver)
    assert not has_stored(config, storage)
    write_snapshot(storage, Snapshot({name: KeptFile("files/key", 1, written_at=1)}))
    assert has_stored(config, storage) is is_stored


def test_checkpoint_of_ray_is_named_before_kept_files(tmp_path: Path) -> None:
    storage, config = RunStorage.open(str(tmp_path / "storage"), "run"), RunConfig(driver=True)
    assert newest_stored(config, storage) is None
    write_snapshot(storage, Snapshot({"state.pt": KeptFile("files/key", 1, written_at=4_000_000_000_000_000_000)}))
    assert str(newest_stored(config, storage)).partition(" of ")[0] == "state.pt"
    storage.write("ray/train/checkpoint_1/model.pt", b"")
    newest = newest_stored(config, storage)
    assert newest
    assert (newest.name, newest.changed_at.timestamp()) == ("ray/train/checkpoint_1/model.pt", 4e9)


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        ("logs/train/.hydra/overrides.yaml", False),
        (".hydra/hydra.yaml", False),
        ("out/args.yaml", False),
        ("lightning_logs/version_0/hparams.yaml", False),
        ("out/training_config.json", False),
        ("out/config.toml", False),
        ("state.json", True),
        ("out/trainer_state.json", True),
        ("out/state.yaml", True),
        ("configs.pt", True),
        ("my.hydra/a.pt", True),
    ],
)
def test_settings_are_not_named_as_kept_files(tmp_path: Path, name: str, is_kept: bool) -> None:
    storage = RunStorage.open(str(tmp_path / "storage"), "run")
    write_snapshot(storage, Snapshot({name: KeptFile("files/key", 1, written_at=1)}))
    assert (newest_of_script(storage) is not None) is is_kept
    assert has_stored(RunConfig(), storage)


def test_a_checkpoint_is_named_before_newer_files(tmp_path: Path) -> None:
    storage = RunStorage.open(str(tmp_path / "storage"), "run")
    storage.write("checkpoints/step-000000020/checkpoint.json", b"{}")
    write_snapshot(storage, Snapshot({"best.pt": KeptFile("files/key", 1, written_at=4_000_000_000_000_000_000)}))
    newest = newest_of_script(storage)
    assert newest
    assert (newest.name, newest.is_loaded) == ("checkpoints/step-000000020", True)
    assert newest.changed_at.timestamp() == 4e9
