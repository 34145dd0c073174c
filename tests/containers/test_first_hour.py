"""README's and the tutorial's commands for AWS in a container with Python alone: no Docker, AWS CLI, plugin or git.

Pulumi's engine is not there: `pulumi up` is tests/emulator with this machine's Terraform, and runs use the other tests'
head and S3. The clone is of the last commit.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.containers.cluster import (
    AWS,
    BUCKET,
    DOCUMENTS,
    LONG,
    ON_CPUS,
    OUTPUTS,
    ROOT,
    TOKEN_PARAMETER,
    Cluster,
)
from tests.containers.engine import Engine
from tests.test_docs import section

PYTHON = "public.ecr.aws/docker/library/python:3.11-slim-bookworm"
ABSENT = ("docker", "aws", "session-manager-plugin", "git")
HOME = "/root/ray-on-ecs"


def lines_of(page: str, heading: str) -> list[str]:
    """Return the commands of a section."""
    blocks = re.findall(r"```sh\n(.*?)```", section(page, heading), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", "").splitlines()
    return [line.partition("  #")[0].strip() for line in lines]


LINES = lines_of("README.md", "On AWS")
OF_RUNS = [line for line in LINES if line.startswith("ray-on-ecs ")]
TO_CREATE = {
    "README": [*(line for line in LINES if line not in OF_RUNS), "ray-on-ecs --version"],
    "tutorial": lines_of("docs/tutorial.md", "Create the cluster"),
}
# Pulumi's command: it knows the stack's name, region and keys, and updates as the emulator does, which also destroys.
PULUMI = """
settings=()
pulumi() {
  case "$1 $2" in
    "stack init") stack=$3 ;;
    "config set") case "$3" in aws:region) region=$4 ;; --path) ;; *) settings+=(--config "$3=$4") ;; esac ;;
    "install ")
      python3 -m venv .venv && .venv/bin/python -m pip install --upgrade pip &&
      .venv/bin/python -m pip install --requirement requirements.txt ;;
    "up ")
      .venv/bin/python -m pip install --group infra &&
      .venv/bin/python -u -m tests.emulator --stack "$stack" --region "$region" "${settings[@]}" ;;
  esac
}"""
# Flags of the Ray Train job, and of the image classifier.
ONE_EPOCH = "--no-use-gpu --data=digits --epochs=1"
MANY_EPOCHS = " ".join(LONG)
OUTPUTS_FILE = "/root/outputs.json"
PUT_TOKEN = f"""
import boto3
ssm = boto3.client("ssm", endpoint_url="http://127.0.0.1:5000", region_name="us-east-1")
ssm.put_parameter(Name="{TOKEN_PARAMETER}", Type="SecureString", Value="any", Overwrite=True)
"""
# Ends a hang.
SECONDS = 3000


@dataclass(frozen=True)
class Machine:
    """A container with Python and a clone."""

    engine: Engine
    name: str

    def type(self, *lines: str) -> str:
        """Type lines into one shell, which must all succeed and miss no program; return what they print."""
        script = "\n".join(["exec 2>&1", f"cd {HOME}", *(f"{line} || exit" for line in lines)])
        done = self.engine.run("exec", self.name, "bash", "-c", script, check=False, timeout=SECONDS)
        assert done.returncode == 0, done.stdout
        assert not re.search(r": (command )?not found$|Traceback", done.stdout, re.MULTILINE), done.stdout
        return done.stdout


@contextmanager
def bare_machine(engine: Engine, folder: Path, *options: str) -> Generator[Machine]:
    """Python's image with a clone, and with this machine's certificates and variables of pip."""
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", folder / "clone"], check=True)
    machine = Machine(engine, f"bare-{secrets.token_hex(3)}")
    pip = (f"--env={name}" for name in os.environ if name.startswith("PIP_"))
    engine.run(
        "run", "--detach", "--init", f"--name={machine.name}", "--volume=/etc/ssl/certs:/etc/ssl/certs:ro", *pip,
        *options, PYTHON, "sleep", "infinity",
    )  # fmt: skip
    try:
        engine.run("cp", str(folder / "clone"), f"{machine.name}:{HOME}")
        for program in ABSENT:
            assert engine.execute(machine.name, "sh", "-c", f"command -v {program}", check=False).returncode, program
        yield machine
    finally:
        engine.remove(machine.name)


def terraform() -> list[str]:
    """Options that give a container this machine's Terraform, and its folder of plugins if there is one."""
    given = os.environ.get("TF_CLI_ARGS_init", "")  # noqa: SIM112
    plugins = given.partition("-plugin-dir=")[2]
    local = [f"--volume={plugins}:{plugins}:ro", f"--env=TF_CLI_ARGS_init={given}"] if plugins else []
    return [f"--volume={shutil.which('terraform')}:/usr/local/bin/terraform:ro", *local]


@pytest.fixture(scope="module")
def laptop(made: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """The machine of someone who trains: README's line with pip, without the program's packages."""
    variables = {
        **AWS,
        **ON_CPUS,
        "AWS_DEFAULT_REGION": "us-east-1",
        "RAY_ON_ECS_CLUSTER": f"s3://{BUCKET}/{DOCUMENTS}",
    }
    options = (f"--env={name}={value}" for name, value in variables.items())
    folder = tmp_path_factory.mktemp("laptop")
    with bare_machine(made.engine, folder, f"--network={made.network}", *options) as machine:
        machine.type("python3 -m venv .venv", *(line for line in LINES if "pip install" in line))
        yield machine


@pytest.mark.timeout(SECONDS)
@pytest.mark.skipif(not shutil.which("terraform"), reason="the emulator needs Terraform")
@pytest.mark.parametrize("page", TO_CREATE)
def test_up_without_docker_builds_in_codebuild(page: str, engine: Engine, tmp_path: Path) -> None:
    with bare_machine(engine, tmp_path, *terraform()) as machine:
        typed = machine.type(PULUMI, *TO_CREATE[page])
    assert "CodeBuild builds build-" in typed
    assert "another plan: no changes" in typed
    assert "left behind: nothing" in typed


def test_readme_trains_with_python_alone(laptop: Machine, cluster: Cluster) -> None:
    train, *others = OF_RUNS
    assert train.endswith(".py")
    typed = laptop.type(
        ". .venv/bin/activate", f"{train} {ONE_EPOCH}", *others,
        *("ray-on-ecs runs", "ray-on-ecs status", "ray-on-ecs logs first", "ray-on-ecs fetch first"),
        f"ray-on-ecs run --detach --run-name second training/image_classifier.py {MANY_EPOCHS}",
        "ray-on-ecs stop second",
        "test -s runs/first/report.html", "test -s runs/first/model.safetensors",
    )  # fmt: skip
    assert f"results in s3://{BUCKET}/runs/first: " in typed
    assert f"{HOME}/runs/first/report.html" in typed
    assert re.search(r"first +finished .*step 1 ", typed)
    assert "run second is stopped" in typed


def test_tutorial_trains_and_shows_the_report(laptop: Machine) -> None:
    *_, copy = lines_of("docs/tutorial.md", "Install")
    train = lines_of("docs/tutorial.md", "Train on two GPUs")
    *look, destroy = lines_of("docs/tutorial.md", "Look, and destroy")
    assert destroy.endswith("pulumi destroy")
    lines = (re.sub(r"\bfirst\b", "tutorial", line).replace("--epochs 300", "--epochs 20") for line in [*train, *look])
    typed = laptop.type(". .venv/bin/activate", copy, f"cd {HOME}", *lines)
    assert "[rank 0] epoch 19: loss" in typed
    assert typed.splitlines()[-1] == "snapshot.pt"


def test_wheel_trains_without_the_repository(laptop: Machine) -> None:
    """In a folder with a script alone, as a colleague's machine has it."""
    typed = laptop.type(
        "python3 -m venv /root/wheel/.venv && . /root/wheel/.venv/bin/activate",
        f"pip wheel --quiet --no-deps --wheel-dir /root/wheel {HOME}",
        "mkdir /root/wheel/code && cd /root/wheel/code && pip install --quiet /root/wheel/*.whl",
        'echo \'import os; print("rank", os.environ["RANK"])\' > train.py',
        "ray-on-ecs run --run-name wheel --device cpu --num-workers 2 train.py",
        "python -c 'import ray_on_ecs; print(ray_on_ecs.__file__)'",
    )
    assert {"[rank 0] rank 0", "[rank 1] rank 1"} <= set(typed.splitlines())
    assert "/root/wheel/.venv/lib/" in typed.splitlines()[-1]


def test_local_script_needs_neither_torch_nor_ray(laptop: Machine) -> None:
    typed = laptop.type(
        ". .venv/bin/activate",
        "echo 'import ray_on_ecs; ray_on_ecs.progress(1); ray_on_ecs.log(loss=0.5)' > plain.py",
        "ray-on-ecs run --local --run-name plain plain.py",
        "ray-on-ecs open --local plain",
    )
    assert re.search(r"no curves.png \(No module named 'matplotlib'\); pip install --upgrade matplotlib", typed)
    assert f"results in {HOME}/results/plain: result.json, report.html, metrics.jsonl\n" in typed


def test_missing_plugin_is_one_line(laptop: Machine, cluster: Cluster) -> None:
    cluster.engine.python(cluster.storage, PUT_TOKEN)
    cluster.engine.execute(laptop.name, "sh", "-c", f"echo '{json.dumps(OUTPUTS)}' > {OUTPUTS_FILE}")
    for command in ("shell", "dashboard", "notebook"):
        ray_on_ecs = (f"{HOME}/.venv/bin/ray-on-ecs", command, f"--outputs={OUTPUTS_FILE}")
        done = cluster.engine.execute(laptop.name, *ray_on_ecs, check=False)
        [line] = done.stderr.splitlines()
        assert done.returncode == 2, command
        assert re.match("ray-on-ecs: command not found: session-manager-plugin; install it: https://", line)
