"""Users of a head who have Python and the credentials of its bucket: requests of runs, followed also over outages."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions, requires, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster import clusters
from ray_on_ecs.cluster.head import Head as RestHead
from ray_on_ecs.contract import CLUSTERS_PREFIX, DOCUMENTS_VARIABLE, SECRETS_VARIABLE, secrets_prefix
from ray_on_ecs.jobs.documents import Documents
from ray_on_ecs.node.api import AnswerError
from ray_on_ecs.storage.bucket import Bucket
from tests.aws import BUCKET, client
from tests.aws import environment as variables_of
from tests.commands.conftest import TINY
from tests.commands.head import SECONDS, TOKEN, commands, read_until
from tests.commands.ray_head import RayHead, ray_head
from tests.flaky_s3 import FlakyProxy, flaky_proxy
from tests.waiting import until

Start = Callable[..., subprocess.Popen[str]]
Type = Callable[..., tuple[int, str, str]]
CLUSTER = f"s3://{BUCKET}/{CLUSTERS_PREFIX}/laptop"
STORAGE = f"s3://{BUCKET}/runs"


def absent() -> list[str]:
    """The packages that a user's machine lacks: `pip install ray-on-ecs` brings only its dependencies, and theirs."""
    needed, new = set[str](), {"ray-on-ecs"}
    while new:
        needed |= new
        wanted = [Requirement(text) for name in new for text in requires(name) or ()]
        found = {
            canonicalize_name(each.name) for each in wanted if not each.marker or each.marker.evaluate({"extra": ""})
        }
        new = found - needed
    ours = {"ray_on_ecs", "tests"}
    of_packages = packages_distributions().items()
    return [
        name
        for name, given in of_packages
        if name.isidentifier()
        and name[0] != "_"
        and name not in ours
        and not needed & set(map(canonicalize_name, given))
    ]


# The command, which gives up a request to S3 sooner.
IMPATIENT = """
import sys
from ray_on_ecs.cluster import aws
from ray_on_ecs.__main__ import main
aws.ATTEMPTS = 1
sys.exit(main(sys.argv[1:]))
"""
SECRET = """
import os
print("has", os.environ["TOKEN"], len(os.environ["TOKEN"]), flush=True)
"""


@pytest.fixture(scope="module")
def head(
    environment: dict[str, str],
    aws_server: str,
    aws_variables: dict[str, str],
    s3_client: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RayHead]:
    """A head whose documents and runs are in an S3 that loses requests and answers."""
    folder = tmp_path_factory.mktemp("head")
    (folder / "state").mkdir()
    keys: dict[str, Any] = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    documents = Documents(Bucket(**keys, endpoint_url=aws_server), CLUSTER.removeprefix("s3://"))
    own = {
        DOCUMENTS_VARIABLE: CLUSTER,
        "RAY_ON_ECS_STORAGE_PATH": STORAGE,
        SECRETS_VARIABLE: secrets_prefix("laptop"),
    }
    with ray_head({**environment, **aws_variables}, folder, documents=documents, **own) as head:
        yield head


@pytest.fixture
def proxy(aws_server: str) -> Iterator[FlakyProxy]:
    """The laptop's connection to AWS."""
    with flaky_proxy(aws_server, 0.0) as proxy:
        yield proxy


@pytest.fixture
def laptop(environment: dict[str, str], proxy: FlakyProxy, head: RayHead, tmp_path: Path) -> Iterator[Start]:
    """Start `ray-on-ecs` on a machine with nothing but Python, the command and the credentials."""
    bin, site = tmp_path / "bin", tmp_path / "site"
    for folder in (bin, site, tmp_path / "home"):
        folder.mkdir()
    for name in absent():
        (site / f"{name}.py").write_text(f"raise ImportError('{name} is not on this machine')\n")
    own = {
        "PATH": str(bin),
        "HOME": str(tmp_path / "home"),
        "PYTHONPATH": f"{site}:{environment['PYTHONPATH']}",
        clusters.CLUSTER_VARIABLE: CLUSTER,
        **variables_of(proxy.url),
    }
    with commands("ray_on_ecs", {**environment, **own}, tmp_path) as start:
        yield start


@pytest.fixture
def composed(
    head: RayHead, aws_server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Type:
    """Run `ray-on-ecs COMMAND --compose` in this process; return its exit status and output."""
    monkeypatch.setattr(clusters, "COMPOSE", CLUSTER)
    monkeypatch.setattr(clusters, "COMPOSE_S3", aws_server)
    monkeypatch.setattr(clusters, "DASHBOARD_URL", head.dashboard)

    def run(command: str, *words: str, **variables: str) -> tuple[int, str, str]:
        for name, value in {**TOKEN, **variables}.items():
            monkeypatch.setenv(name, value)
        return main([command, "--compose", *words]), *capsys.readouterr()

    return run


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


def state(aws_server: str, name: str) -> str:
    """The state in a run's folder."""
    s3 = client("s3", aws_server)
    return json.loads(s3.get_object(Bucket=BUCKET, Key=f"runs/{name}/status.json")["Body"].read())["state"]


def test_detached_run_is_followed_over_an_outage_and_stopped(
    laptop: Start, proxy: FlakyProxy, head: RayHead, aws_server: str, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    run = ("--run-name", "left", "--num-workers", "1", *TINY, "--hold", "2", str(hold), "--hold", "3", str(tmp_path))
    status, out, err = end(laptop("run", "--detach", "--json", *run))
    assert status == 0, err
    assert json.loads(out) == {"run_name": "left", "job": "left", "storage_path": f"{STORAGE}/left"}

    repeated = laptop("run", *run, code=IMPATIENT)
    follower = laptop("logs", "--follow", "left", code=IMPATIENT)
    logs = {process: read_until(process, "step 2: loss") for process in (repeated, follower)}
    with proxy.outage():
        for process in logs:
            assert process.stderr
            assert any("waiting for the log" in line for line in process.stderr)
        hold.unlink()
    for process in logs:
        logs[process] += read_until(process, "step 3: loss")
        assert logs[process].count("script   tiny.py") == 1
        assert [logs[process].count(f"step {step}: loss") for step in (1, 2, 3)] == [1, 1, 1]
    line = "run left is already active as job left, with the flags of its first command: its log from the start"
    assert logs[repeated].startswith(f"{line}\n")

    repeated.send_signal(signal.SIGINT)
    status, _, err = end(repeated)
    assert status == 130
    goes_on = "ray-on-ecs logs --follow left shows its log, ray-on-ecs stop left stops it"
    assert err.endswith(f"run left continues as job left: {goes_on}\n")
    until(lambda: state(aws_server, "left") == "training")
    shown = json.loads(end(laptop("status", "--json"))[1])
    assert (shown["jobs"]["running"], shown["ray_version"]) == (1, version("ray"))
    [listed] = [run for run in json.loads(end(laptop("runs", "--json"))[1]) if run["name"] == "left"]
    assert listed["state"] == "training"

    status, _, err = end(laptop("stop", "left"))
    assert status == 0, err
    assert "run left is stopped" in err
    status, out, err = end(follower)
    assert status == 130, err
    way_on = "nothing is stored yet, so the same command with --run-name left starts from the beginning"
    assert out.endswith(f"ray-on-ecs: stopped; {way_on}\n")
    assert state(aws_server, "left") == "interrupted"
    assert head.jobs["left"] == "STOPPED"
    assert end(laptop("stop", "left"))[0] == 2


def test_one_command_trains_and_fetches_results(laptop: Start, tmp_path: Path) -> None:
    run = ("run", "--fetch=copies", "--run-name", "whole", "--num-workers", "1", *TINY)
    status, out, err = end(laptop(*run))
    assert status == 0, out + err
    assert "step 4: loss 0.25" in out
    assert (tmp_path / "copies" / "whole" / "files" / "model.txt").read_text() == "0.25\n"
    status, again, err = end(laptop(*run))
    assert (status, again) == (2, ""), err
    assert "is finished" in err

    def typed(*words: str) -> str:
        status, out, err = end(laptop(*words))
        assert status == 0, out + err
        return out

    assert typed("logs", "whole").splitlines() == out.splitlines()[1:]
    assert "report.html" in typed("open", "--no-browser", "whole")
    typed("fetch", "whole", "other")
    [listed] = [run for run in json.loads(typed("runs", "--json")) if run["name"] == "whole"]
    assert (listed["state"], listed["step"], listed["loss"]) == ("finished", 4, 0.25)


def test_secret_of_a_request_reaches_its_script(laptop: Start, aws_server: str, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "show.py").write_text(SECRET)
    flags = ("--run-name", "secret", "--num-workers", "1", "--secret", "TOKEN", "--working-dir", str(code))
    status, out, err = end(laptop("run", *flags, "show.py", TOKEN="of-a-laptop"))
    assert status == 0, out + err
    assert "has *** 11" in out
    ssm = client("ssm", aws_server)
    until(lambda: not ssm.get_parameters_by_path(Path=secrets_prefix("laptop"), Recursive=True)["Parameters"])


def test_mistake_of_a_script_is_the_exit_status(laptop: Start) -> None:
    status, out, err = end(laptop("run", "--num-workers", "1", *TINY, "--refuse"))
    assert status == 2, out + err
    assert "tiny.py: error: refused" in out


def test_rest_of_ray_answers_requests_of_a_notebook(head: RayHead) -> None:
    ray = RestHead(head.dashboard, TOKEN["RAY_AUTH_TOKEN"])
    ray.submit("twice", "echo said", {"run_name": "echo"})
    with pytest.raises(AnswerError, match=r"500: ValueError: Job with submission_id twice already exists"):
        ray.submit("twice", "echo said", {})
    until(lambda: ray.job("twice")["status"] == "SUCCEEDED")
    assert "\nsaid\n" in ray.log("twice")
    assert ray.job("twice")["metadata"] == {"run_name": "echo"}
    ray.stop_job("twice")
    for ask in (ray.job, ray.stop_job, ray.log):
        with pytest.raises(AnswerError, match=r"refused at http://.*/absent[a-z/]* \(404: .*\)"):
            ask("absent")


def test_wrong_token_is_one_line(composed: Type) -> None:
    status, out, err = composed("dashboard", "--no-browser", RAY_AUTH_TOKEN="another")
    assert (status, out) == (2, "")
    assert err.startswith("ray-on-ecs: the Ray head refuses the token; set RAY_AUTH_TOKEN to the one in docker/.env")
    assert err.count("\n") == 1


def test_status_shows_the_state_of_ray(composed: Type) -> None:
    status, out, err = composed("status")
    assert status == 0, err
    first, *lines = out.splitlines()
    assert first == "compose"
    assert [line.split()[0] for line in lines] == ["head", "GPUs", "jobs"]
    assert f"Ray {version('ray')}, up " in lines[0]
    assert lines[0].endswith(" of 2 CPUs in use")
    assert lines[1].endswith("0 of 0 in use, 0 requested")


def test_status_as_json(composed: Type) -> None:
    document = json.loads(composed("status", "--json")[1])
    assert document["gpus"] == {"used": 0, "total": 0, "requested": 0}
    [node] = document["nodes"]
    assert (node["kind"], node["cpus"]) == ("head", 2)


def test_doctor_passes_all_checks(composed: Type) -> None:
    status, out, err = composed("doctor")
    assert status == 0, out + err
    names = [line.partition(":")[0] for line in out.splitlines()]
    assert names == ["ok  cluster", "ok  bucket", "ok  head", "ok  nodes", "ok  code"]
