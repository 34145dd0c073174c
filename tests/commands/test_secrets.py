"""Secrets of a run on real clusters: its processes have them, and nothing else shows or keeps them."""

import base64
import json
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

from tests.aws import client
from tests.commands.head import SECONDS, SECRETS, commands, read_until
from tests.commands.ray_head import RayHead, ray_head
from tests.local_cluster import OPEN_MPI
from tests.serving import serving
from tests.waiting import until

VALUE = "hf_0123456789secret"
[PREFIX] = SECRETS.values()
# Prints its secret in some ways, from a package that only the private index has; with a file as argument it waits.
SCRIPT = """
import os, sys, time
from pathlib import Path
import greeting
print("says", greeting.SAYS, "token", os.environ["TOKEN"], flush=True)
print(f"variables {dict(os.environ)}", flush=True)
while sys.argv[1:] and Path(sys.argv[1]).exists():
    time.sleep(0.1)
"""
MPI = """
import os
from mpi4py import MPI
print("rank", MPI.COMM_WORLD.rank, "token", os.environ["TOKEN"], flush=True)
MPI.COMM_WORLD.barrier()
raise RuntimeError(f"refused {os.environ['TOKEN']}")
"""
PROGRAM = """
import os
import ray.train
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

def train():
    import greeting
    print("worker says", greeting.SAYS, "token", os.environ["TOKEN"], flush=True)
    ray.train.report({"loss": 1.0})

print("program token", os.environ["TOKEN"], flush=True)
DataParallelTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=1)).fit()
"""
Start = Callable[..., subprocess.Popen[str]]


class Index(HTTPServer):
    """A package index with one package, protected by a password."""

    def __init__(self, wheel: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Packages)
        self.wheel = wheel


class _Packages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        wheel = cast(Index, self.server).wheel
        if self.headers["Authorization"] != "Basic " + base64.b64encode(f"user:{VALUE}".encode()).decode():
            self.send_error(401)
            return
        self.send_response(200)
        is_list = self.path == "/simple/greeting/"
        self.send_header("Content-Type", "text/html" if is_list else "application/zip")
        self.end_headers()
        link = f'<a href="/{wheel.name}">{wheel.name}</a>'
        self.wfile.write(link.encode() if is_list else wheel.read_bytes())

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the tests report errors."""


@pytest.fixture
def code(tmp_path: Path) -> Iterator[Path]:
    """A user's folder, whose requirements are in a private index."""
    wheel = tmp_path / "greeting-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        info = "greeting-1.0.dist-info"
        file.writestr("greeting.py", "SAYS = 'hello'\n")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    folder = tmp_path / "code"
    folder.mkdir()
    for name, text in {"show": SCRIPT, "mpi_show": MPI, "program": PROGRAM}.items():
        (folder / f"{name}.py").write_text(text)
    with serving(Index(wheel)) as server:
        index = f"http://user:${{TOKEN}}@127.0.0.1:{server.server_port}/simple/"
        (folder / "requirements.txt").write_text(f"--index-url {index}\ngreeting\n")
        yield folder


@pytest.fixture(scope="module")
def head(
    environment: dict[str, str], aws_variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayHead]:
    """A head whose desk deletes the secrets of runs that have ended."""
    folder = tmp_path_factory.mktemp("head")
    for name in ("state", "documents", "runs"):
        (folder / name).mkdir()
    with ray_head({**environment, **aws_variables, **OPEN_MPI, **SECRETS}, folder) as head:
        yield head


@pytest.fixture
def typed(head: RayHead, code: Path) -> Iterator[Start]:
    """Start `ray-on-ecs` in the head's container, in that folder."""
    with commands("ray_on_ecs", {**head.shell, "TOKEN": VALUE}, code) as start:
        yield start


def stored(aws_server: str) -> list[dict[str, Any]]:
    return client("ssm", aws_server).get_parameters_by_path(Path=PREFIX, Recursive=True)["Parameters"]


def with_value(*folders: Path, value: str = VALUE) -> list[Path]:
    """The files below some folders that have the value."""
    return [path for folder in folders for path in folder.rglob("*") if value.encode() in content(path)]


def content(path: Path) -> bytes:
    """The bytes of a file; none of anything else, or once it is deleted."""
    try:
        return path.read_bytes() if path.is_file() else b""
    except FileNotFoundError:
        return b""


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


def check_shown_nowhere(typed: Start, head: RayHead, run_name: str) -> None:
    """Check the output and the files of a run."""
    runs = head.folder / "runs"
    [job] = [file for file in head.folder.glob("state/jobs/*/job.json") if f'"{run_name}"' in file.read_text()]
    assert json.loads(job.read_text())["uri"] == str(runs / run_name)
    assert json.loads((runs / run_name / "run.json").read_text())["settings"]["secret"] == ["TOKEN"]
    shown = [out + err for _, out, err in map(end, (typed("logs", run_name), typed("runs", "--json")))]
    assert "token ***" in shown[0]
    assert not [each for each in shown if VALUE in each]
    assert (runs / run_name / "report.html").exists()
    for place in (runs / run_name, job.parent):
        assert with_value(place, value="token ***")
    until(lambda: with_value(head.folder / "documents", value="token ***"), SECONDS, head.log.read_text)
    assert not with_value(head.folder, head.temporary)


def test_only_script_and_pip_have_the_secret(head: RayHead, typed: Start, code: Path, aws_server: str) -> None:
    hold = code.parent / "hold"
    hold.touch()
    flags = ("--run-name", "secret", "--num-workers", "2", "--secret", "TOKEN", "--requirements", "requirements.txt")
    process = typed("run", *flags, "show.py", str(hold))
    first = read_until(process, "says hello token ***")
    [parameter] = stored(aws_server)
    assert (parameter["Type"], parameter["Name"].split("/")[-3::2]) == ("SecureString", ["secret", "TOKEN"])
    hold.unlink()
    status, out, err = end(process)
    assert status == 0, first + out + err
    assert VALUE not in first + out + err
    assert (first + out).count("says hello token ***") == 2
    assert "'TOKEN': '***'" in first + out
    check_shown_nowhere(typed, head, "secret")
    until(lambda: not stored(aws_server), SECONDS, head.log.read_text)


@pytest.mark.fault
def test_failed_mpi_program_hides_the_secret(head: RayHead, typed: Start, aws_server: str) -> None:
    status, out, err = end(typed("run", "--run-name", "secret-mpi", "--mpi", "--secret", "TOKEN", "mpi_show.py"))
    assert status == 1, out + err
    assert {f"rank {rank} token ***" for rank in (0, 1)} <= set(out.splitlines())
    assert "refused ***" in json.loads((head.folder / "runs" / "secret-mpi" / "error.json").read_text())["what"]
    check_shown_nowhere(typed, head, "secret-mpi")
    until(lambda: not stored(aws_server), SECONDS, head.log.read_text)


def test_ray_program_and_workers_have_the_secret(head: RayHead, typed: Start, aws_server: str) -> None:
    flags = ("--run-name", "secret-program", "--secret", "TOKEN", "--requirements", "requirements.txt")
    status, out, err = end(typed("run", *flags, "program.py"))
    assert status == 0, out + err
    assert "program token ***" in out
    assert "worker says hello token ***" in out
    check_shown_nowhere(typed, head, "secret-program")
    until(lambda: not stored(aws_server), SECONDS, head.log.read_text)


@pytest.mark.fault
def test_stop_deletes_the_secret(typed: Start, head: RayHead, code: Path, aws_server: str) -> None:
    flags = ("--run-name", "secret-stopped", "--working-dir", str(code), "--num-workers", "1", "--secret", "TOKEN")
    process = typed("run", *flags, "--requirements", "requirements.txt", "show.py", str(code))
    read_until(process, "token ***")
    assert len(stored(aws_server)) == 1
    assert typed("stop", "secret-stopped").wait(SECONDS) == 0
    assert process.wait(SECONDS) == 130
    assert not stored(aws_server)
    status, _, err = end(typed("run", *flags, "show.py", TOKEN=""))
    assert (status, err) == (2, "ray-on-ecs: --secret: TOKEN is not set; export it, and give the same command again\n")
    command = [sys.executable, "-P", "-m", "ray_on_ecs.run", str(head.folder / "runs" / "secret-stopped")]
    done = subprocess.run(command, env={**head.shell, "TOKEN": VALUE}, capture_output=True, text=True, check=False)
    line = "the run's value of TOKEN is deleted; give the same command again, with the variable set"
    assert (done.returncode, f"ray-on-ecs: --secret: {line}\n" in done.stdout + done.stderr) == (2, True)


@pytest.mark.fault
def test_resubmitted_run_has_the_secret(head: RayHead, typed: Start, aws_server: str, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    flags = ("--run-name", "again", "--num-workers", "1", "--secret", "TOKEN", "--requirements", "requirements.txt")
    process = typed("run", *flags, "show.py", str(hold))
    read_until(process, "token ***")
    head.kill_driver()
    output = read_until(process, "token ***")
    assert "submitted run again again as job again.2" in output
    hold.unlink()
    status, out, err = end(process)
    assert status == 0, out + err
    assert VALUE not in output + out + err
    until(lambda: head.jobs["again.2"] == "SUCCEEDED", SECONDS, head.log.read_text)
    assert head.jobs["again"] == "FAILED"
    until(lambda: not stored(aws_server), SECONDS, head.log.read_text)
    assert not with_value(head.folder)


@pytest.mark.fault
def test_local_secret_file_is_deleted_with_the_run(environment: dict[str, str], code: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    flags = ("--local", "--num-workers", "1", "--secret", "TOKEN", "--requirements", "requirements.txt")
    with commands("ray_on_ecs", {**environment, "HOME": str(home), "TOKEN": VALUE}, code) as start:
        process = start("run", *flags, "--run-name", "cut", "show.py", str(code))
        read_until(process, "token ***")
        [file] = with_value(home)
        assert file.stat().st_mode & 0o777 == 0o600
        process.send_signal(signal.SIGINT)
        status, out, err = end(process)
        assert status == 130, out + err
        assert not with_value(home, code)
        status, out, err = end(start("run", *flags, "--run-name", "cut", "show.py"))
        assert status == 0, out + err
        assert not with_value(home, code)
