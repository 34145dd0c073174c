"""A GPU that is lost in the middle of a run: the run continues on another node, and the node ends.

`test_refusals` has the next start on such an instance, which requests its replacement.
"""

import re
from contextlib import ExitStack
from pathlib import Path

from tests.containers.cluster import CODE, Cluster
from tests.waiting import until

# The file in a container with the status of its CUDA driver, and the status for a GPU without a device file.
STATUS_FILE, NO_DEVICE = "/tmp/cuda-status", 100
STEPS = 40
SCRIPT = f"""
import ctypes, sys, time
from pathlib import Path
file = Path("step.txt")
step = int(file.read_text()) if file.exists() else 0
print(f"begins after step {{step}}", flush=True)
while step < {STEPS}:
    if ctypes.CDLL("libcuda.so.1").cuInit(0):
        sys.exit("RuntimeError: CUDA error: no CUDA-capable device is detected")
    step += 1
    file.write_text(str(step))
    print(f"step {{step}} is done", flush=True)
    time.sleep(0.5)
"""


def test_run_continues_without_node_of_a_lost_gpu(cluster: Cluster, tmp_path: Path) -> None:
    engine = cluster.engine
    (cluster.code / "steps.py").write_text(SCRIPT)
    log = tmp_path / "log"
    with ExitStack() as stack:
        workers = [
            stack.enter_context(cluster.one_more("gpu-worker", name, FAKE_CUDA=STATUS_FILE))
            for name in ("gpu-1", "gpu-2")
        ]
        until(lambda: sum("GPU" in node["resources_total"] for node in cluster.nodes()) == 2)
        flags = ("--run-name=lost-gpu", "--num-workers=1", "--device=cuda", f"--working-dir={CODE}")
        command = ("ray-on-ecs", "run", *flags, "steps.py")
        run = engine.start("exec", cluster.head, *command, output=log)
        until(lambda: "step 5 is done" in log.read_text(), why=log.read_text)
        [address] = cluster.trained_on("ALIVE")
        [broken] = [name for name in workers if engine.address(name, cluster.network) == address]
        engine.execute(broken, "sh", "-c", f"echo {NO_DEVICE} > {STATUS_FILE}")
        until(lambda: run.poll() is not None, why=log.read_text)
        text = log.read_text()
        assert run.poll() == 0, text
        assert f"cuInit returns {NO_DEVICE}; this node stops" in text
        first, *later = map(int, re.findall(r"begins after step (\d+)", text))
        assert first == 0
        assert len(later) == 1
        assert later[0] >= 5, text
        assert text.count("failure 1 in a row") == 1, text
        assert "nodes are being reclaimed; restarting" in text
        assert engine.wait(broken)[0] == 0, "ECS starts it again, and the check before it joins fails"
