"""The name of the checkpoint from which a script restarts."""

import os
from pathlib import Path

from ray_on_ecs.run.newest import newest_of_script
from ray_on_ecs.tracking.storage import RunStorage


def test_newest_complete_checkpoint_is_named(tmp_path: Path) -> None:
    storage = RunStorage.open(str(tmp_path), "run")
    assert newest_of_script(storage) is None
    for seconds, step in enumerate((20, 9, 30), start=1_700_000_000):
        storage.write(f"checkpoints/step-{step:09d}/__0_0.distcp", b"weights")
        if step < 30:  # the last one has no manifest yet
            storage.write(f"checkpoints/step-{step:09d}/checkpoint.json", b"{}")
            os.utime(tmp_path / "run" / "checkpoints" / f"step-{step:09d}" / "checkpoint.json", (seconds, seconds))
    found = newest_of_script(storage)
    assert found
    name, written_at = found
    assert (name, written_at.timestamp()) == ("checkpoints/step-000000020", 1_700_000_000)
