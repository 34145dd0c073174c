"""Mounts of an instance: the commands of its user data, with stand-ins for the commands that they call."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.config import rules
from infra.definitions import policies
from infra.definitions.local_disks import MOUNTED, MOVE
from infra.definitions.local_disks import UNIT as DISKS_UNIT
from infra.definitions.mounts import (
    CACHE_DIR,
    GIVE_UP_SECONDS,
    HOST_DIR,
    LOCAL_CACHE_DIR,
    SCRIPT,
    UNIT,
    LustreFileSystem,
    Mounts,
    mount_all,
    script,
)
from infra.definitions.sizing import PREFETCH_MIB
from infra.definitions.user_data import user_data
from infra.errors import SettingError
from tests.waiting import until

LUSTRE = LustreFileSystem(dns_name="fs-1.fsx.us-west-2.amazonaws.com", mount_name="abc")
ALL = Mounts(s3={"data": "my-data/faces", "all": "my-other"}, lustre=LUSTRE, efs="fs-2")
COMMANDS = ("chown", "df", "dnf", "mount", "mount-s3", "mountpoint", "rpm", "shutdown", "systemd-notify", "umount")
# The last argument is the folder of a mount, which has a file while it is mounted. A fault is a line of shell.
STAND_IN = """#!/bin/bash
name=$(basename "$0") last=${*: -1}
echo "$name $*" >> calls
[[ -e fault-$name ]] && { source "fault-$name"; }
case $name in
  rpm) [[ -e installed ]] ;;
  dnf) touch installed ;;
  df) printf 'Avail\\n40000\\n' ;;
  mountpoint) [[ -e is-$(basename "$last") ]] || { echo "$last is not a mountpoint"; exit 32; } ;;
  mount | mount-s3) touch "is-$(basename "$last")" ;;
  umount) rm -f "is-$(basename "$last")" ;;
esac
"""


class Instance:
    """The script on an instance, with shorter times; `start` starts it as systemd does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[str] | None = None
        (folder / "bin").mkdir()
        for name in COMMANDS:
            command = folder / "bin" / name
            command.write_text(STAND_IN)
            command.chmod(0o755)

    def start(self, mounts: Mounts = ALL, *, gives_up: bool = False) -> None:
        text = script(mounts).replace("timeout -k 5 120", "timeout -k 1 2").replace("sleep 5", "sleep 0.05")
        text = text.replace(f">= {GIVE_UP_SECONDS}", ">= 0" if gives_up else ">= 1000").replace("sleep 1;", "sleep .1;")
        for path in (HOST_DIR, CACHE_DIR, LOCAL_CACHE_DIR, "/run"):
            text = text.replace(path, str(self.folder / path.strip("/").replace("/", "-")))
        (self.folder / "run").mkdir(exist_ok=True)
        with (self.folder / "journal").open("a") as journal:
            self._process = subprocess.Popen(
                ["bash", "-c", text],
                cwd=self.folder,
                env={"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"},
                stdout=journal,
                stderr=journal,
                text=True,
                start_new_session=True,
            )

    def kill(self) -> None:
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def fault(self, command: str, line: str) -> None:
        (self.folder / f"fault-{command}").write_text(line)

    def mend(self, command: str) -> None:
        (self.folder / f"fault-{command}").unlink()

    def lose(self, name: str) -> None:
        (self.folder / f"is-{name}").unlink()

    @property
    def calls(self) -> list[str]:
        calls = self.folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    @property
    def journal(self) -> str:
        return (self.folder / "journal").read_text()

    @property
    def is_ready(self) -> bool:
        return "systemd-notify --ready" in self.calls

    @property
    def mounted(self) -> set[str]:
        return {path.name.removeprefix("is-") for path in self.folder.glob("is-*")}

    @property
    def is_down(self) -> bool:
        return "shutdown -h now" in self.calls


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    machine = Instance(tmp_path)
    yield machine
    machine.kill()


def test_all_are_mounted_before_the_agent_may_start(instance: Instance) -> None:
    instance.start()
    until(lambda: instance.is_ready)
    assert instance.mounted == {"data", "all", "fsx", "efs"}
    calls = [call.replace(str(instance.folder), "") for call in instance.calls]
    root, cache = f"/{HOST_DIR.strip('/').replace('/', '-')}", f"/{CACHE_DIR.strip('/').replace('/', '-')}"
    options = "--read-only --allow-other --uid 1000 --gid 1000"
    of_data = f"--prefix faces/ --cache {cache}/data --max-cache-size 5000 my-data {root}/data"
    assert [call for call in calls if call.startswith(("mount ", "mount-s3 ", "dnf "))] == [
        "dnf install -y mount-s3 lustre-client amazon-efs-utils",
        f"mount-s3 {options} {of_data}",
        f"mount-s3 {options} --cache {cache}/all --max-cache-size 5000 my-other {root}/all",
        f"mount -t lustre -o noatime,flock fs-1.fsx.us-west-2.amazonaws.com@tcp:/abc {root}/fsx",
        f"mount -t efs -o tls,iam fs-2:/ {root}/efs",
    ]


def test_new_lustre_belongs_to_the_containers_user(instance: Instance) -> None:
    instance.start(Mounts(lustre=LustreFileSystem(dns_name="fs-1", mount_name="abc", is_new=True)))
    until(lambda: instance.is_ready)
    assert any(call.startswith("chown 1000:1000 ") for call in instance.calls)


# By name: the command at fault, what it does then, and the words that a person reads.
FAULTS = {
    "package is absent": ("dnf", "echo 'Error: Unable to find a match: mount-s3'; exit 1", "find a match: mount-s3"),
    "repository is unreachable": ("dnf", "echo 'Error: Failed to download metadata'; exit 1", "download metadata"),
    "installation hangs": ("dnf", "exec sleep 60", "amazon-efs-utils: "),
    "kernel has no module": ("mount", "echo 'mount.lustre: No such device'; exit 19", "fsx: mount.lustre: No such"),
    "name has no address": ("mount", 'echo "can\'t parse mgsnid" >&2; exit 1', "fsx: can't parse mgsnid"),
    "security group does not admit": ("mount", "echo 'Connection timed out'; exit 110", "fsx: Connection timed out"),
    "bucket does not exist": ("mount-s3", "echo 'Error: The bucket does not exist'; exit 1", "data: Error: The bucket"),
    "access is denied": ("mount-s3", "printf 'Error:\\n\\n  Access Denied\\n' >&2; exit 1", "data:   Access Denied"),
    "mount hangs": ("mount-s3", "exec sleep 60", "data: "),
    "mount hangs and ignores its end": ("mount-s3", "trap '' TERM; while :; do sleep 0.1; done", "data: "),
    "mount is not there": ("mount-s3", "exit 0", "data: "),
    "command is absent": ("mount-s3", "exit 127", "data: "),
    "mount is stale": ("mountpoint", "echo 'Transport endpoint is not connected'; exit 1", "data: "),
    "new owner is refused": ("chown", "exit 1", "fsx: "),
}
OWNED = Mounts(s3=ALL.s3, lustre=LustreFileSystem(dns_name=LUSTRE.dns_name, mount_name="abc", is_new=True), efs=ALL.efs)


@pytest.mark.parametrize("name", FAULTS)
def test_instance_that_can_not_mount_says_why_and_ends(instance: Instance, name: str) -> None:
    command, line, words = FAULTS[name]
    instance.fault(command, line)
    instance.start(OWNED, gives_up=True)
    until(lambda: instance.is_down)
    assert words in instance.journal
    assert "this instance does not join, and shuts down" in instance.journal
    assert not instance.is_ready


@pytest.mark.parametrize("name", [name for name in FAULTS if "hangs" not in name])
def test_fault_that_passes_delays_the_instance(instance: Instance, name: str) -> None:
    command, line, words = FAULTS[name]
    instance.fault(command, line)
    instance.start(OWNED)
    until(lambda: words in instance.journal)
    instance.mend(command)
    until(lambda: instance.is_ready)
    assert instance.mounted == {"data", "all", "fsx", "efs"}
    assert not instance.is_down


def test_words_of_bash_are_names_of_mounts(instance: Instance) -> None:
    words = "case coproc do done elif else esac fi for function if in select then time until while"
    names = [*words.split(), "true", "exit", "return", "local", "echo", "0", "1", "x-1", "DO", "EOF"]
    instance.start(Mounts(s3=dict.fromkeys(names, "my-data")))
    until(lambda: instance.is_ready)
    assert instance.mounted == {*names}


def test_cache_is_on_the_local_disks_in_use(instance: Instance) -> None:
    (instance.folder / "is-local-disks").touch()
    instance.start()
    until(lambda: instance.is_ready)
    calls = [call for call in instance.calls if call.startswith("mount-s3 ")]
    assert calls
    assert all(f"--cache {instance.folder}/mnt-local-disks-cache/" in call for call in calls)


def test_mountpoint_reads_ahead_in_a_bounded_window(instance: Instance) -> None:
    variable = "UNSTABLE_MOUNTPOINT_MAX_PREFETCH_WINDOW_SIZE"
    instance.fault("mount-s3", f'touch "is-$(basename "$last")"; echo "window ${variable}" >> calls')
    instance.start()
    until(lambda: instance.is_ready)
    assert f"window {PREFETCH_MIB * 2**20}" in instance.calls


def test_folder_with_files_is_mounted_over(instance: Instance) -> None:
    file = instance.folder / HOST_DIR.strip("/").replace("/", "-") / "data" / "old"
    file.parent.mkdir(parents=True)
    file.touch()
    instance.start()
    until(lambda: instance.is_ready)


def test_file_in_place_of_a_folder_is_named(instance: Instance) -> None:
    root = instance.folder / HOST_DIR.strip("/").replace("/", "-")
    root.mkdir()
    (root / "data").touch()
    instance.start(gives_up=True)
    until(lambda: instance.is_down)
    assert "File exists" in instance.journal


def test_lost_mount_is_made_again(instance: Instance) -> None:
    instance.start()
    until(lambda: instance.is_ready)
    instance.fault("mount-s3", "echo 'Error: no answer'; exit 1")
    instance.lose("data")
    until(lambda: "data: Error: no answer" in instance.journal)
    instance.mend("mount-s3")
    until(lambda: "data" in instance.mounted)


def test_restarted_script_never_ends_an_instance_that_joined(instance: Instance) -> None:
    instance.start()
    until(lambda: instance.is_ready)
    instance.kill()
    calls = len(instance.calls)
    instance.fault("mount-s3", "echo 'Error: no answer'; exit 1")
    instance.lose("data")
    instance.start(gives_up=True)
    until(lambda: instance.journal.count("data: Error: no answer") > 3)
    assert not instance.is_down
    instance.mend("mount-s3")
    until(lambda: instance.calls[calls:].count("systemd-notify --ready") == 1)
    assert not [call for call in instance.calls[calls:] if call.startswith("mount ")], "others are mounted"


def test_agent_waits_for_mounts_at_each_boot() -> None:
    lines = mount_all(ALL).splitlines()
    assert {"Type=notify", "Before=ecs.service", "RequiredBy=ecs.service", f"ExecStart={SCRIPT}"} <= set(lines)
    assert lines[-1] == f"systemctl enable --now {UNIT} || exit 1"
    text = user_data("ray-cluster", mount_all(ALL))
    assert text.index(lines[-1]) < text.index("ECS_CLUSTER")


def test_local_disks_come_before_mounts() -> None:
    text = user_data("ray-cluster", mount_all(ALL), local_disks=True)
    assert text.index(f"systemctl enable --now {DISKS_UNIT}") < text.index(f"systemctl enable --now {UNIT} || exit 1")
    assert f"After=network-online.target {DISKS_UNIT}.service" in text
    assert f" mounted={MOUNTED}\n" in MOVE


def test_without_mounts_user_data_stays_as_it_is() -> None:
    assert mount_all(Mounts()) == ""
    assert user_data("ray-cluster", mount_all(Mounts())) == user_data("ray-cluster")


@pytest.mark.parametrize("prefix", ["it's", "$(touch made)", "`touch made`", 'a"b', "a\\b", "a;b", "year=2026", "é"])
def test_prefix_is_an_argument_whatever_it_holds(instance: Instance, prefix: str) -> None:
    instance.start(Mounts(s3={"data": f"my-data/{prefix}"}))
    until(lambda: instance.is_ready)
    [call] = [call for call in instance.calls if call.startswith("mount-s3")]
    assert f"--prefix {prefix}/ --cache" in call
    assert not (instance.folder / "made").exists()


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="ShellCheck is not installed")
@pytest.mark.parametrize("text", [script(ALL), user_data("ray-cluster", mount_all(ALL))])
def test_shellcheck_accepts_the_commands(text: str) -> None:
    done = subprocess.run(["shellcheck", "-s", "bash", "-"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def are_accepted(mounts: dict[str, str]) -> bool:
    """False for too many mounts."""
    try:
        rules.mounts("mounts", mounts)
    except SettingError as error:
        return "too long for the instances' user data and role" not in str(error)
    return True


@pytest.mark.parametrize("name", [1, 8, 32])
@pytest.mark.parametrize("prefix", [0, 30, 150, 900])
def test_accepted_mounts_fit_user_data_and_role(name: int, prefix: int) -> None:
    """EC2 refuses more than 16 KiB, and IAM more than 10,240 characters of a role's inline policies."""
    made: dict[str, str] = {}
    while are_accepted(made):
        label = f"{len(made):02}".rjust(name, "n")[-max(name, 2) :]
        made[label] = f"s3://{'b' * 20}/{'p' * prefix}".rstrip("/")
    made.popitem()
    sources = {key: address.removeprefix("s3://") for key, address in made.items()}
    of_all = Mounts(s3=sources, lustre=LUSTRE, efs="fs-0123456789abcdef0")
    assert made
    assert len(user_data("a" * 100, mount_all(of_all))) < 16 * 1024
    efs_arn = "arn:aws-us-gov:elasticfilesystem:us-gov-west-1:123456789012:file-system/fs-0123456789abcdef0"
    policy = json.dumps(policies.mounted("aws-us-gov", list(sources.values()), efs_arn=efs_arn), separators=(",", ":"))
    others = (
        policies.ecs_agent(f"arn:aws:ecs:us-west-2:123456789012:cluster/{'c' * 255}"),
        policies.session_manager("*"),
    )
    assert len(policy) + sum(len(json.dumps(other)) for other in others) < 10_240
