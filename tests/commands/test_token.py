"""A run on a cluster with another token."""

from pathlib import Path

from tests.commands.head import SECONDS, Head, commands
from tests.local_cluster import DIRECT

# Joins as a run does.
JOIN = """
from ray_on_ecs.errors import TrainingError
from ray_on_ecs.run import ray_cluster

try:
    ray_cluster.connect()
except TrainingError as error:
    print(type(error).__name__, error)
    raise SystemExit(error.exit_status)
"""


def test_refused_token_is_one_line(head: Head, environment: dict[str, str], tmp_path: Path) -> None:
    with commands(DIRECT, environment, tmp_path) as start:
        process = start(code=JOIN, RAY_ADDRESS=head.address, RAY_AUTH_TOKEN="another")
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, err) == (2, "TokenError the Ray head refuses the token\n", "")
