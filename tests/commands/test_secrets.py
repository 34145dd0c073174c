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
from tests.commands.head import ON_HEAD, SECONDS, SECRETS, Head, commands, read_until
from tests.commands.head import TOKEN as RAYS
from tests.commands.ray_head import ray_head
from tests.serving import serving

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


@pytest.fixture
def shell(environment: dict[str, str], aws_variables: dict[str, str], head: Head) -> dict[str, str]:
    """The environment of a shell in the head's container."""
    own = {**environment, **aws_variables, **SECRETS, **ON_HEAD, **head.variables}
    return {**own, "RAY_API_SERVER_ADDRESS": head.dashboard}


@pytest.fixture
def typed(shell: dict[str, str], code: Path) -> Iterator[Start]:
    """Start `ray-on-ecs` in the head's container, in that folder."""
    with commands("ray_on_ecs", {**shell, "TOKEN": VALUE}, code) as start:
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


def check_shown_nowhere(typed: Start, head: Head, run_name: str) -> None:
    """Check the output and the files of a run."""
    command = ["curl", "--silent", "--header", f"Authorization: Bearer {RAYS['RAY_AUTH_TOKEN']}"]
    jobs = subprocess.run([*command, f"{head.dashboard}/api/jobs/"], capture_output=True, text=True, check=True).stdout
    [job] = [each for each in json.loads(jobs) if each["submission_id"] == run_name]
    assert job["entrypoint"].endswith(f" {head.storage / run_name}")
    assert json.loads((head.storage / run_name / "run.json").read_text())["settings"]["secret"] == ["TOKEN"]
    shown = [jobs, *(out + err for _, out, err in map(end, (typed("logs", run_name), typed("runs", "--json"))))]
    assert "token ***" in shown[1]
    assert not [each for each in shown if VALUE in each]
    run = head.storage / run_name
    assert (run / "report.html").exists()
    for place in (run, head.temporary):
        assert with_value(place, value="token ***")
    assert not with_value(head.storage, head.temporary)


def test_only_script_and_pip_have_the_secret(head: Head, typed: Start, code: Path, aws_server: str) -> None:
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
    assert not stored(aws_server)


@pytest.mark.fault
def test_failed_mpi_program_hides_the_secret(head: Head, typed: Start, aws_server: str) -> None:
    status, out, err = end(typed("run", "--run-name", "secret-mpi", "--mpi", "--secret", "TOKEN", "mpi_show.py"))
    assert status == 1, out + err
    assert {f"rank {rank} token ***" for rank in (0, 1)} <= set(out.splitlines())
    assert "refused ***" in json.loads((head.storage / "secret-mpi" / "error.json").read_text())["what"]
    check_shown_nowhere(typed, head, "secret-mpi")
    assert not stored(aws_server)


def test_ray_program_and_workers_have_the_secret(head: Head, typed: Start, aws_server: str) -> None:
    flags = ("--run-name", "secret-program", "--secret", "TOKEN", "--requirements", "requirements.txt")
    status, out, err = end(typed("run", *flags, "program.py"))
    assert status == 0, out + err
    assert "program token ***" in out
    assert "worker says hello token ***" in out
    check_shown_nowhere(typed, head, "secret-program")
    assert not stored(aws_server)


@pytest.mark.fault
def test_stop_deletes_the_secret(shell: dict[str, str], typed: Start, head: Head, code: Path, aws_server: str) -> None:
    flags = ("--run-name", "secret-stopped", "--working-dir", str(code), "--num-workers", "1", "--secret", "TOKEN")
    process = typed("run", *flags, "--requirements", "requirements.txt", "show.py", str(code))
    read_until(process, "token ***")
    assert len(stored(aws_server)) == 1
    assert typed("stop", "secret-stopped").wait(SECONDS) == 0
    assert process.wait(SECONDS) == 130
    assert not stored(aws_server)
    status, _, err = end(typed("run", *flags, "show.py", TOKEN=""))
    assert (status, err) == (2, "ray-on-ecs: --secret: TOKEN is not set; export it, and give the same command again\n")
    job = ("job", "submit", "--", sys.executable, "-P", "-m", "ray_on_ecs.run", str(head.storage / "secret-stopped"))
    command = [sys.executable, "-m", "ray.scripts.scripts", *job]
    done = subprocess.run(command, env={**shell, "TOKEN": VALUE}, capture_output=True, text=True, check=False)
    line = "the run's value of TOKEN is deleted; give the same command again, with the variable set"
    assert f"\nray-on-ecs: --secret: {line}\n" in done.stdout
    assert "exit code 2" in done.stdout + done.stderr


@pytest.mark.fault
def test_resubmitted_run_has_the_secret(
    environment: dict[str, str], aws_variables: dict[str, str], aws_server: str, code: Path, tmp_path: Path
) -> None:
    for name in ("state", "runs"):
        (tmp_path / name).mkdir()
    hold = tmp_path / "hold"
    hold.touch()
    own = {**environment, **aws_variables, **SECRETS}
    flags = ("--run-name", "again", "--num-workers", "1", "--secret", "TOKEN", "--requirements", "requirements.txt")
    with ray_head(own, tmp_path) as head:
        variables = {**own, **head.environment, **ON_HEAD, "RAY_API_SERVER_ADDRESS": head.dashboard, "TOKEN": VALUE}
        with commands("ray_on_ecs", variables, code) as start:
            process = start("run", *flags, "show.py", str(hold))
            read_until(process, "token ***")
            head.kill_driver()
            said = read_until(process, "token ***")
            assert "submitted run again again as job again.2" in said
            hold.unlink()
            status, out, err = end(process)
        assert status == 0, out + err
        assert VALUE not in said + out + err
        assert head.jobs == {"again": "FAILED", "again.2": "SUCCEEDED"}
    assert not stored(aws_server)
    assert not with_value(tmp_path / "runs", tmp_path / "state")


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
