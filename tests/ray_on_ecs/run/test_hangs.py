"""Hangs of one of three ranks with real processes; drills/hangs.py has more."""

from pathlib import Path

import psutil
import pytest

from ray_on_ecs.run.stacks import NO_RIGHTS, Stacks
from tests.hangs import hanging, sentence
from tests.waiting import LIMIT_SECONDS


# The first takes long.
@pytest.mark.parametrize("case", [pytest.param("loader", marks=pytest.mark.ray), "mismatch", "stop", "fork"])
def test_rank_that_hangs_is_named(case: str, tmp_path: Path) -> None:
    with hanging(case, 3, 1, tmp_path) as hang:
        if any(each.fault == NO_RIGHTS for each in hang.processes[0].dump()):
            pytest.skip(NO_RIGHTS)
        hang.wait_for(sentence(case, 3, 1), LIMIT_SECONDS)
        root = psutil.Process(hang.processes[0].pid)
        states = [each.status() for each in root.children(recursive=True)]
        assert psutil.STATUS_TRACING_STOP not in states
        assert "hanging_script.py" in str(Stacks(processes=hang.processes[1].dump()))
