"""Run without a job: `python direct_run.py FLAGS SCRIPT` stores a run as `ray-on-ecs run` does, and is its driver."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # a user's modules must not hide ours

from ray_on_ecs import secrets
from ray_on_ecs.cli.run import command
from ray_on_ecs.cli.run_flags import settings_of
from ray_on_ecs.cluster.clusters import LocalCluster
from ray_on_ecs.command import exit_status
from ray_on_ecs.run import document
from ray_on_ecs.run.__main__ import main
from ray_on_ecs.run.code import archive
from ray_on_ecs.tracking.results import check_not_finished


def store(words: list[str]) -> str:
    """Store the code and the document of a run, and return its folder."""
    with command.make_context("run", words) as context:
        config, given = settings_of(context.params)
    cluster = LocalCluster()  # without Ray: for its storage path
    if "storage_path" in given:
        cluster.storage_path = cluster.absolute(config.storage_path)
    storage = cluster.storage(str(config.run_name))
    storage.check_writable()
    check_not_finished(storage)
    values = secrets.take_from_environment(config.secret)
    stored = archive.store(config, storage, print, is_here=True)
    if values:
        secrets.store(storage.uri).put(values)
    document.write(storage, config, given, stored, document.read_earlier(storage))
    return storage.uri


def run(words: list[str]) -> int:
    """Train; return the exit status."""
    uri = store(words)
    return main([uri])


if __name__ == "__main__":
    sys.exit(exit_status(lambda: run(sys.argv[1:]), "interrupted before it started"))
