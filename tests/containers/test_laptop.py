"""A laptop outside the cluster: `ray-on-ecs` reaches its S3, and the head only through Session Manager's stand-in.

The laptop is a container with the command and a copy of training/. Pulumi is not installed, so the stack's outputs are
in a file.
"""

import json
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.cluster.session import RESPONSE
from tests.containers.cluster import (
    AWS,
    BUCKET,
    CODE,
    EPOCHS,
    HURRY,
    LONG,
    NAME,
    ON_CPUS,
    OUTPUTS,
    ROOT,
    TOKEN_PARAMETER,
    Cluster,
)
from tests.front import SESSION
from tests.waiting import until

HOME = "/laptop"
# The script on the laptop, with a model in its folder that the image doesn't have.
SCRIPT = (f"--working-dir={HOME}/training", "image_classifier.py")
OWN_MODEL = """
from torch import nn

def build(channels, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 28 * 28, classes))
"""
SETUP = """
import boto3, os, sys
boto3.client("ssm").put_parameter(Name={name!r}, Type="SecureString", Value={value!r}, Overwrite=True)
ecs = boto3.client("ecs")
ecs.create_cluster(clusterName={cluster!r})
container = {{"name": "ray-head", "image": "x", "memory": 128}}
task = ecs.register_task_definition(family="head", containerDefinitions=[container])
if not ecs.describe_services(cluster={cluster!r}, services=["head"])["services"]:
    arn = task["taskDefinition"]["taskDefinitionArn"]
    ecs.create_service(cluster={cluster!r}, serviceName="head", taskDefinition=arn, desiredCount=1)
"""
# Arguments: words of a command line, and a signal or 0. Prints the processes, and sends them the signal.
PROCESSES = """
import contextlib, os, pathlib, sys
words, number = sys.argv[1], int(sys.argv[2])
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):  # some end meanwhile
        line = (folder / "cmdline").read_bytes().replace(b"\\0", b" ").decode()
        if words in line and int(folder.name) != os.getpid():
            os.kill(int(folder.name), number)
            print(folder.name)
"""
PLUGIN = "session-manager-plugin"
# The laptop's AWS, which answers requests for sessions.
FRONT_PORT = 5002
FRONT = f"from tests.front import Front; Front({AWS['AWS_ENDPOINT_URL']!r}, {FRONT_PORT}).serve_forever()"
COMPOSE_S3_PORT = 5001
HOUR_AHEAD = "import time; now = time.time; time.time = lambda: now() + 3600\n"
SECONDS = 300


@dataclass
class Laptop:
    """The laptop's container."""

    cluster: Cluster
    name: str

    def type(
        self, *words: str, status: int = 0, outputs: str = "outputs.json", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Type a command, which must end with this status and without a traceback."""
        done = self.cluster.engine.run(
            "exec", *self._variables(outputs, variables), self.name, "python", "-m", "ray_on_ecs", *words,
            check=False, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def line(self, *words: str, status: int, **given: str) -> str:
        """Return the one line of a command that fails."""
        done = self.type(*words, status=status, **given)
        [line] = done.stderr.splitlines()
        assert line.startswith("ray-on-ecs: "), line
        return line

    def start(self, *words: str, output: Path) -> subprocess.Popen[str]:
        """Type a command and do not wait for it."""
        return self.cluster.engine.start(
            "exec", *self._variables("outputs.json", {}), self.name, "python", "-m", "ray_on_ecs", *words, output=output
        )

    def processes(self, words: str, number: int = 0) -> list[str]:
        """Send a signal to its processes with these words in their command lines, and return their IDs."""
        return self.cluster.engine.python(self.name, PROCESSES, words, str(number)).split()

    @staticmethod
    def _variables(outputs: str, variables: dict[str, str]) -> list[str]:
        given = {"RAY_ON_ECS_OUTPUTS": f"{HOME}/{outputs}", **variables}
        return [f"--env={name}={value}" for name, value in given.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The laptop's files: the command, its stand-ins, and code that is newer than in the image."""
    folder = tmp_path_factory.mktemp("laptop") / "home"  # only its user can read pytest's folder
    for package in ("ray_on_ecs", "training"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "training" / "mymodels.py").write_text(OWN_MODEL)
    shutil.copytree(ROOT / "tests" / "ray_on_ecs" / "cli" / "bin", folder / "bin")
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "front.py", folder / "tests")
    (folder / "hour-ahead").mkdir()
    (folder / "hour-ahead" / "sitecustomize.py").write_text(HOUR_AHEAD)
    (folder / "outputs.json").write_text(json.dumps(OUTPUTS))
    (folder / "down.json").write_text(json.dumps({**OUTPUTS, "token_parameter": "gone", "cluster_name": "gone"}))
    (folder / "none.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def container(made: Cluster, folder: Path) -> Iterator[Laptop]:
    made.settle()
    name = f"{made.network}-laptop"
    variables = {
        **AWS,
        **ON_CPUS,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_SSM": f"http://127.0.0.1:{FRONT_PORT}",
        "PYTHONPATH": HOME,
        "COLUMNS": "120",
        "TERM": "dumb",
        "RAY_ON_ECS_CLUSTER": "",
    }
    made.engine.run(
        "run", "--detach", "--init", f"--name={name}", f"--network={made.network}",
        f"--volume={folder}:{HOME}:ro", f"--volume={made.code}:{CODE}:ro", "--volume=/tmp",
        *(f"--env={key}={value}" for key, value in variables.items()),
        f"--env=PATH={HOME}/bin:/usr/local/bin:/usr/bin:/bin", "--workdir=/tmp",
        made.image, "python", "-c", FRONT,
    )  # fmt: skip
    yield Laptop(made, name)
    made.engine.remove(name)


@pytest.fixture
def laptop(container: Laptop, cluster: Cluster) -> Laptop:
    """The laptop of a healthy cluster, with the cluster's token in the stack's parameter."""
    set_token(container, cluster.engine.secrets["RAY_AUTH_TOKEN"])
    return container


def listed(laptop: Laptop, name: str, state: str) -> dict[str, Any] | None:
    """The entry of a run in `runs`, if it is in this state."""
    found = [run for run in json.loads(laptop.type("runs", "--json").stdout) if run["name"] == name]
    return found[0] if found and found[0]["state"] == state else None


def set_token(laptop: Laptop, token: str) -> None:
    laptop.cluster.engine.python(laptop.name, SETUP.format(name=TOKEN_PARAMETER, value=token, cluster=NAME))


def test_one_command_trains_and_fetches_results(laptop: Laptop) -> None:
    script = (*SCRIPT, "--data=digits", "--model=mymodels:build", "--epochs=3")
    done = laptop.type("run", "--run-name=from-laptop", "--fetch=/tmp/results", *script)
    assert "run from-laptop is submitted as job from-laptop" in done.stdout
    assert ", 2 x CPU" in done.stdout
    assert "results in " in done.stdout
    assert not laptop.processes(PLUGIN)
    kept = set(laptop.cluster.engine.execute(laptop.name, "ls", "/tmp/results/from-laptop").stdout.split())
    wanted = {"result.json", "metrics.jsonl", "curves.png", "model.safetensors", "report.html", "status.json", "logs"}
    assert kept >= wanted
    report = laptop.cluster.read("runs/from-laptop/report.html")
    assert "from-laptop" in report
    assert "data:image/png;base64," in report

    [run] = [run for run in json.loads(laptop.type("runs", "--json").stdout) if run["name"] == "from-laptop"]
    assert (run["state"], run["step"]) == ("finished", 33)
    assert run["cost_usd"] > 2, "two instances cost a dollar a second each"
    assert "from-laptop" in laptop.type("runs").stdout
    assert "results in " in laptop.type("logs", "from-laptop").stdout
    assert "report.html" in laptop.type("open", "--no-browser", "from-laptop").stdout
    again = laptop.type("run", "--run-name=from-laptop", *script, status=2)
    assert "is finished" in again.stderr


def test_user_scripts_run_and_runs_have_metrics(laptop: Laptop) -> None:
    names = [f"script-{epochs}-{secrets.token_hex(2)}" for epochs in (2, 3)]
    metric = "--metric=loss=loss {number}"
    for epochs, name in zip((2, 3), names, strict=True):
        done = laptop.type(
            "run", f"--working-dir={CODE}", metric, f"--run-name={name}", "ddp_snapshot.py", "--epochs", str(epochs)
        )
        assert f"uploading {CODE}" in done.stderr
        assert "epoch 1: loss" in done.stdout
    runs = {run["name"]: run for run in json.loads(laptop.type("runs", "--json").stdout)}
    assert all(runs[name]["metrics"]["loss"] is not None for name in names)


def test_followed_run_is_shown_without_lost_lines(laptop: Laptop, cluster: Cluster, tmp_path: Path) -> None:
    name = f"shown-{secrets.token_hex(2)}"
    output = tmp_path / "log"
    process = laptop.start("run", f"--run-name={name}", *SCRIPT, *LONG, output=output)
    try:
        until(lambda: "epoch 2/" in output.read_text(), SECONDS, output.read_text)
        until(lambda: (listed(laptop, name, "training") or {}).get("step"), SECONDS)
        status = json.loads(laptop.type("status", "--json").stdout)
        assert [len(status["nodes"]), status["jobs"]["running"]] == [3, 1]
        assert f"run      {name}" in laptop.type("logs", name).stdout
        for worker in cluster.workers:
            cluster.engine.execute(worker, "touch", HURRY)
        assert process.wait(SECONDS) == 0, output.read_text()
    finally:
        cluster.stop_jobs()
        for worker in cluster.workers:
            cluster.engine.execute(worker, "rm", "-f", HURRY)
    log = output.read_text()
    for epoch in range(EPOCHS):
        assert log.count(f"[rank 0] epoch {epoch + 1}/") == 1, f"the line of epoch {epoch + 1}, once: {log}"


def test_detached_run_is_followed_and_stopped(laptop: Laptop, tmp_path: Path) -> None:
    name = f"left-{secrets.token_hex(2)}"
    started = json.loads(laptop.type("run", "--detach", "--json", f"--run-name={name}", *SCRIPT, *LONG).stdout)
    assert started == {"run_name": name, "job": name, "storage_path": f"s3://{BUCKET}/runs/{name}"}
    output = tmp_path / "log"
    follower = laptop.start("logs", "--follow", name, output=output)
    try:
        until(lambda: "epoch 1/" in output.read_text(), SECONDS, output.read_text)
    finally:
        laptop.type("stop", name)
    assert follower.wait(SECONDS) == 130
    assert f"stopped; the same command with --run-name {name} resumes the run" in output.read_text()
    assert f"run {name} is not under way" in laptop.line("stop", name, status=2)
    assert listed(laptop, name, "interrupted")


def test_dashboard_is_forwarded_until_interrupted(laptop: Laptop, tmp_path: Path) -> None:
    output = tmp_path / "log"
    process = laptop.start("dashboard", "--no-browser", output=output)
    until(lambda: "Ctrl-C closes it" in output.read_text(), SECONDS, output.read_text)
    url = output.read_text().split()[1]
    ask = f"import urllib.request; print(urllib.request.urlopen({url!r}).status)"
    assert laptop.cluster.engine.python(laptop.name, ask) == "200"
    assert laptop.processes(PLUGIN)
    laptop.processes("ray_on_ecs dashboard", signal.SIGINT)
    assert process.wait(SECONDS) == 0
    assert not laptop.processes(PLUGIN)


def test_compose_cluster_needs_no_session(laptop: Laptop, cluster: Cluster) -> None:
    """Compose publishes the port of its S3 on the laptop."""
    parameters = {"host": ["s3"], "portNumber": ["5000"], "localPortNumber": [str(COMPOSE_S3_PORT)]}
    request = json.dumps({"Target": "i-1", "DocumentName": OUTPUTS["forward_document"], "Parameters": parameters})
    plugin = (PLUGIN, RESPONSE, "us-east-1", "StartSession", "", request, "http://unused")
    response = f"--env={RESPONSE}={json.dumps(SESSION)}"
    cluster.engine.run("exec", "--detach", response, laptop.name, *plugin)
    try:
        ask = ("python", "-c", f"import socket; socket.create_connection(('127.0.0.1', {COMPOSE_S3_PORT}))")
        until(lambda: cluster.engine.execute(laptop.name, *ask, check=False).returncode == 0, SECONDS)
        typed = partial(laptop.type, RAY_ON_ECS_OUTPUTS="", AWS_ENDPOINT_URL="")
        name = f"composed-{secrets.token_hex(2)}"
        run = ("run", "--compose", f"--run-name={name}", "--fetch=/tmp/composed")
        done = typed(*run, *SCRIPT, "--data=digits", "--epochs=1")
        assert "results in " in done.stdout
        assert cluster.engine.execute(laptop.name, "test", "-s", f"/tmp/composed/{name}/report.html").returncode == 0
        assert f'"{name}"' in typed("runs", "--compose", "--json").stdout
        checked = typed("doctor", "--compose").stdout
        assert "ok  head: wrote its state" in checked
        assert f"ok  bucket: s3://{BUCKET}/runs can be read and written" in checked
    finally:
        laptop.processes(PLUGIN, signal.SIGKILL)


def test_shell_is_a_session_of_the_stack_document(laptop: Laptop) -> None:
    says = f"a shell by {OUTPUTS['shell_document']} on {OUTPUTS['head_instance_id']}"
    assert laptop.type("shell").stdout.splitlines()[-1] == says


def test_notebook_without_its_packages_is_one_line(laptop: Laptop) -> None:
    assert "--install lets Ray install it" in laptop.line("notebook", "--no-browser", status=2)


def test_wrong_clock_stops_nothing(laptop: Laptop) -> None:
    ahead = f"{HOME}/hour-ahead:{HOME}"
    assert laptop.type("runs", PYTHONPATH=ahead).returncode == 0


def test_errors_are_one_line(laptop: Laptop, cluster: Cluster) -> None:
    assert "pulumi up creates it" in laptop.line("status", status=3, outputs="none.json")
    assert "--outputs" in laptop.line("runs", status=2, outputs="missing.json")
    assert "has not written its state yet" in laptop.line("stop", "any", status=3, outputs="down.json")
    assert "is down, or in another account" in laptop.line("dashboard", status=3, outputs="down.json")
    set_token(laptop, "another")
    assert "refuses the token" in laptop.line("dashboard", "--no-browser", status=2)
    set_token(laptop, cluster.engine.secrets["RAY_AUTH_TOKEN"])


def test_new_run_waits_for_a_replaced_head(laptop: Laptop, cluster: Cluster, tmp_path: Path) -> None:
    cluster.engine.run("stop", cluster.head, timeout=180)
    assert "being replaced" in laptop.line("dashboard", "--no-browser", status=3)
    output = tmp_path / "log"
    name = f"waits-{secrets.token_hex(2)}"
    process = laptop.start("run", f"--run-name={name}", *SCRIPT, "--data=digits", "--epochs=1", output=output)
    until(lambda: "waiting for the head" in output.read_text(), SECONDS, output.read_text)
    cluster.settle()
    assert process.wait(SECONDS) == 0, output.read_text()
    assert "results in " in output.read_text()
