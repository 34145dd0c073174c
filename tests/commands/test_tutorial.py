"""The tutorial's commands for the laptop, with its script for two epochs."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.commands.head import SECONDS, commands
from tests.test_docs import ROOT, section

ON_THE_LAPTOP = section("docs/tutorial.md", "Train on the laptop")
# Each once: the second command that trains is the first one again, after Ctrl-C.
TYPED = dict.fromkeys(re.findall(r"^\$ ray-on-ecs (.*)", ON_THE_LAPTOP, re.MULTILINE))


@pytest.mark.smoke
def test_tutorial_trains_on_the_laptop(environment: dict[str, str], tmp_path: Path) -> None:
    code = tmp_path / "my-training"
    code.mkdir()
    shutil.copy(ROOT / "examples" / "ddp_snapshot.py", code / "train.py")
    shown = []
    with commands("ray_on_ecs", {**environment, "BROWSER": "true"}, code) as start:
        for line in TYPED:
            process = start(*shlex.split(re.sub(r"--epochs \d+", "--epochs 2", line)))
            out, err = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, out + err
            shown.append(out)
    trained, listed, opened = shown
    assert "[rank 0] epoch 1: loss" in trained
    assert f"results in {code}/results/try: result.json, report.html, files/my-training, " in trained
    assert re.search(r"(?m)^try  finished +step 2 ", listed)
    assert opened.splitlines() == [f"{code}/runs/try/report.html", f"{code}/runs/try/curves.png"]
    assert (code / "results" / "try" / "files" / "my-training" / "snapshot.pt").exists()
