"""A health check says what is the matter, while the container itself still runs."""

from tests.containers.cluster import Cluster, until

# A signal to the processes of a name; containers have no tools for that.
SIGNAL = """
import contextlib, os, pathlib, signal
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):  # some end meanwhile
        if (folder / "comm").read_text().strip() == "{process}":
            os.kill(int(folder.name), signal.{signal})
"""


def test_a_head_whose_state_hangs_is_ill(cluster: Cluster) -> None:
    cluster.engine.python(cluster.head, SIGNAL.format(process="gcs_server", signal="SIGSTOP"))
    try:
        assert not cluster.is_well(cluster.head), "nothing could join it or start on it"
    finally:
        cluster.engine.python(cluster.head, SIGNAL.format(process="gcs_server", signal="SIGCONT"))
    until(lambda: cluster.is_well(cluster.head), 30)


def test_a_worker_that_the_head_has_lost_is_ill(cluster: Cluster) -> None:
    name = cluster.workers[0]
    cluster.engine.python(name, SIGNAL.format(process="raylet", signal="SIGSTOP"))
    try:
        until(lambda: not cluster.is_well(name), 150)  # the head asks five times, each for some seconds
        assert cluster.is_running(name), "nothing but the health check tells"
    finally:
        cluster.engine.remove(name)  # as ECS does with what is ill


def test_a_worker_whose_head_hangs_is_well(cluster: Cluster) -> None:
    cluster.engine.run("pause", cluster.head)
    try:
        assert cluster.is_well(cluster.workers[0]), "it is the head that has to be replaced"
    finally:
        cluster.engine.run("unpause", cluster.head)
    until(lambda: cluster.is_well(cluster.head), 60)
