"""`ray-on-ecs status` and `doctor` of a Ray head on this machine."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.commands.head import Head

SECONDS = 120


def ray_on_ecs(
    head: Head, environment: dict[str, str], *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command on the cluster of this machine, at the head's dashboard."""
    reach = {**head.variables, "RAY_API_SERVER_ADDRESS": head.dashboard}
    return subprocess.run(
        [sys.executable, "-m", "ray_on_ecs", *arguments, "--local"],
        env={**environment, **reach, **variables},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_status_shows_the_state_of_ray(head: Head, environment: dict[str, str]) -> None:
    done = ray_on_ecs(head, environment, "status")
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first == "this machine"
    titles = [line.split()[0] for line in lines]
    assert titles == ["head", "GPUs", "jobs"]
    assert f"Ray {version('ray')}, up " in lines[0]
    assert lines[0].endswith(" of 2 CPUs in use")
    assert lines[1].endswith("0 of 0 in use, 0 requested")


def test_status_as_json(head: Head, environment: dict[str, str]) -> None:
    found = json.loads(ray_on_ecs(head, environment, "status", "--json").stdout)
    assert found["gpus"] == {"used": 0, "total": 0, "requested": 0}
    [node] = found["nodes"]
    assert (node["kind"], node["cpus"]) == ("head", 2)


def test_doctor_passes_all_checks(head: Head, environment: dict[str, str]) -> None:
    done = ray_on_ecs(head, environment, "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        *("ok  Ray", "ok  version", "ok  nodes", "ok  storage")
    ]


def test_doctor_names_a_wrong_token_and_unwritable_folder(
    head: Head, environment: dict[str, str], tmp_path: Path
) -> None:
    done = ray_on_ecs(head, environment, "doctor", RAY_AUTH_TOKEN="wrong")
    assert done.returncode == 1
    assert done.stdout.splitlines()[0].endswith(
        "  Ray: the Ray head refuses the token; set RAY_AUTH_TOKEN to the cluster's"
    )
    (tmp_path / "file").touch()
    done = ray_on_ecs(head, environment, "doctor", RAY_ON_ECS_STORAGE_PATH=str(tmp_path / "file" / "runs"))
    assert done.returncode == 1
    assert "can't be written" in done.stdout.splitlines()[-1]
