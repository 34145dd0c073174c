"""Network benchmark on two ranks with Gloo: its table, its metrics and its picture."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from training.network_bench import FACTORS

SCRIPT = Path(__file__).parents[2] / "training" / "network_bench.py"
ROW = re.compile(r"(all_reduce|all_gather|reduce_scatter) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+)")


# https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
@pytest.mark.parametrize(
    ("name", "factors"), [("all_reduce", (1.0, 1.75)), ("all_gather", (0.5, 0.875)), ("reduce_scatter", (0.5, 0.875))]
)
def test_bus_bandwidth_is_that_of_nccl_tests(name: str, factors: tuple[float, float]) -> None:
    assert (FACTORS[name](2), FACTORS[name](8)) == factors


def test_table_has_each_collective_and_size(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run(
        [*torchrun, "--max-mib", "4", "--times", "1"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert done.stdout.startswith("Gloo, 2 ranks on 1 node\n")
    rows = ROW.findall(done.stdout)
    assert [(name, size) for name, size, *_ in rows] == [(name, size) for size in "124" for name in FACTORS]
    for name, size, milliseconds, algbw, busbw in rows:
        assert float(algbw) == pytest.approx(int(size) * 2**20 / float(milliseconds) / 1e6, abs=0.02, rel=0.01)
        assert float(busbw) == pytest.approx(float(algbw) * FACTORS[name](2), abs=0.02)
    assert (tmp_path / "network.png").read_bytes().startswith(b"\x89PNG")
