"""The script for local disks on loop devices, with real XFS and mounts in a mount namespace; needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from infra.definitions.local_disks import MOVE, SCRIPT, move_docker

pytestmark = pytest.mark.container

ROOT = [] if os.geteuid() == 0 else ["sudo", "-n"]
TOOLS = ("losetup", "unshare", "nsenter", "mkfs.xfs", "mkfs.ext4", "mkswap", "sfdisk", "blkid", "wipefs", "findmnt")
STORE, EBS = "Amazon EC2 NVMe Instance Storage        ", "Amazon Elastic Block Store              "
FOLDERS = ("docker", "containerd")
# A root volume of 64 MiB with Docker's files, and folders of the machine that the script writes. Of the machine's
# devices only those of the test are there: no array of the machine can be meant.
PREPARE = """
set -e
mount --make-rprivate /
for place in /mnt /usr/local/bin /etc/systemd/system /sys/block; do mkdir -p $place; mount -t tmpfs none $place; done
mount -t tmpfs -o size=64m none /var/lib
mkdir -p /var/lib/docker/volumes /var/lib/containerd
echo image > /var/lib/docker/image; chown 1000:1000 /var/lib/docker/image; chmod 640 /var/lib/docker/image
ln -s image /var/lib/docker/link; chmod 710 /var/lib/docker
echo content > /var/lib/containerd/content
mkdir /mnt/dev
for name in null zero random urandom fd stdin stdout stderr $LOOPS; do cp -a /dev/$name /mnt/dev; done
mount --bind /mnt/dev /dev
mkdir /mnt/upper /mnt/work
mount -t overlay -o lowerdir=/usr/sbin,upperdir=/mnt/upper,workdir=/mnt/work none /usr/sbin
rm -f /usr/sbin/mdadm
for loop in $DISKS; do mkdir -p /sys/block/$loop/device; done
"""
# Each call is noted. A service has the state of its file.
# The agent's start waits for user data, and is cancelled with Docker, of which it is a part.
SYSTEMCTL = """
case "$*" in
  stop*docker*) echo cancelled > FOLDER/agent ;;
  start*ecs) echo waiting > FOLDER/agent ;;
esac
case "$1" in
  is-active) cat STATE ;;
  stop) [ ! -e FOLDER/stuck ] || exit 1; echo inactive > STATE ;;
  start) [ "$2" = --no-block ] || exit $(cat FOLDER/starts 2> /dev/null || echo 0) ;;
  enable) exec $(sed -n 's/^ExecStart=//p' /etc/systemd/system/$3.service) ;;
esac
"""
# The loop device `array` is the array, as not each kernel has arrays.
MDADM = """
case "$1" in
  --create)
    folder=/sys/block/ARRAY/slaves; mkdir -p $folder
    for disk in ${@:8}; do mkswap -q $disk; touch $folder/${disk#/dev/}; done
    mkdir -p /dev/md; ln -sf ../ARRAY /dev/md/ray-on-ecs; ln -sf ARRAY /dev/md127 ;;
  --stop) rm -r /dev/md /dev/md127 /sys/block/ARRAY ;;
  --assemble) [ -e FOLDER/assembled ] ;;
esac
"""


@dataclass
class Instance:
    """An instance with disks; programs in `bin` stand before the machine's."""

    folder: Path
    loops: list[str] = field(default_factory=list)
    holder: subprocess.Popen[str] | None = None
    pid: str = ""

    def disk(self, model: str = STORE, mib: int = 320) -> str:
        """Attach a disk, and return its name."""
        image = self.folder / f"disk{len(self.loops)}"
        with image.open("wb") as file:
            file.truncate(mib * 2**20)
        loop = subprocess.run(
            [*ROOT, "losetup", "--show", "--find", image], capture_output=True, text=True, check=False
        )
        if loop.returncode:
            pytest.skip(f"this machine allows no loop devices: {loop.stderr.strip()}")
        name = Path(loop.stdout.strip()).name
        self.loops.append(name)
        if model:
            models = self.folder / "models"
            models.mkdir(exist_ok=True)
            (models / name).write_text(f"{model}\n")
        return name

    def program(self, name: str, text: str) -> None:
        """Put a program before the machine's, which notes its calls."""
        folder = self.folder / "bin"
        folder.mkdir(exist_ok=True)
        text = text.replace("FOLDER", str(self.folder)).replace("STATE", str(self.folder / "state"))
        (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {self.folder}/calls\n{text}\n')
        (folder / name).chmod(0o755)

    def fails(self, name: str, when: str = "") -> None:
        """Let the calls of a program fail whose arguments contain a text."""
        real = shutil.which(name)
        self.program(name, f'case "$*" in *"{when}"*) exit 1 ;; esac\nexec {real} "$@"')

    def works(self, name: str) -> None:
        """Take such a program away."""
        (self.folder / "bin" / name).unlink()

    def run(self, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command on the instance."""
        if not self.holder:
            self._start()
        enter = [*ROOT, "nsenter", f"--target={self.pid}", "--mount", "env", f"PATH={self._path}"]
        return subprocess.run([*enter, *command], input=text, capture_output=True, text=True, timeout=120, check=False)

    def shell(self, text: str) -> str:
        """Run commands, and return what they print."""
        ran = self.run("bash", "-c", text)
        assert not ran.returncode, ran.stderr
        return ran.stdout.strip()

    def boot(self, *arguments: str) -> str:
        """Run the script, and return its last line."""
        ran = self.run("bash", "-s", *arguments, text=MOVE)
        assert ran.returncode == 0, ran.stderr
        output = self.shell("cat /var/lib/ray-on-ecs/local-disks")
        assert output in ran.stdout
        return output

    def calls(self, name: str) -> list[str]:
        """Calls of a program that notes them."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]

    def device(self, folder: str = "docker") -> str:
        """Device on which a folder of /var/lib is mounted; empty on the root volume."""
        return self.run("findmnt", "-no", "SOURCE", f"/var/lib/{folder}").stdout.partition("[")[0].strip()

    def has_all(self) -> bool:
        """Docker's and containerd's files are as they were."""
        stat = "stat -c '%u:%a' docker/image docker; readlink docker/link"
        found = self.shell(f"cd /var/lib; cat docker/image containerd/content; {stat}")
        return found.split() == ["image", "content", "1000:640", "0:710", "image"]

    def stays(self) -> bool:
        """Docker's files are on the root volume, and nothing is mounted."""
        mounted = self.run("findmnt", "-no", "TARGET", "/mnt/local-disks").stdout
        return self.has_all() and not mounted and not any(map(self.device, FOLDERS))

    def reboot(self) -> None:
        """End the mounts and the services."""
        self.run("umount", *(f"/var/lib/{folder}" for folder in FOLDERS), "/mnt/local-disks")
        (self.folder / "state").write_text("inactive\n")

    def close(self) -> None:
        if self.holder:
            self.holder.communicate()  # closes its input, at which it ends, and its mounts with it
        for loop in self.loops:
            subprocess.run([*ROOT, "losetup", "--detach", f"/dev/{loop}"], check=False)

    @property
    def _path(self) -> str:
        return f"{self.folder}/bin:{os.environ['PATH']}:/usr/sbin:/sbin"

    def _start(self) -> None:
        models = {file.name for file in (self.folder / "models").glob("*")}
        variables = [f"LOOPS={' '.join(self.loops)}", f"DISKS={' '.join(models)}", f"PATH={self._path}"]
        script = f"{PREPARE}\necho $$; read -r line\n"
        self.holder = subprocess.Popen(
            [*ROOT, "env", *variables, "unshare", "--mount", "bash", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.holder.stdout
        self.pid = self.holder.stdout.readline().strip()
        if not self.pid.isdecimal():
            pytest.skip(f"this machine allows no mounts: {self.pid}")
        for name in models:
            self.run("tee", f"/sys/block/{name}/device/model", text=(self.folder / "models" / name).read_text())


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")]
    if missing:
        pytest.skip(f"local disks need {' and '.join(missing)}")
    if subprocess.run([*ROOT, "true"], capture_output=True, check=False).returncode:
        pytest.skip("local disks need root")
    machine = Instance(tmp_path)
    (tmp_path / "state").write_text("active\n")
    machine.program("systemctl", SYSTEMCTL)
    machine.program("mdadm", "exit 1")
    machine.program("dnf", "exit 1")
    machine.program("udevadm", "")
    yield machine
    machine.close()


def with_array(instance: Instance, disks: int) -> str:
    """Attach disks and the device that stands for their array, and return its name."""
    for _ in range(disks):
        instance.disk()
    array = instance.disk(model="", mib=640)
    instance.program("mdadm", MDADM.replace("ARRAY", array))
    return array


@pytest.mark.parametrize("others", [[], [EBS], [EBS, EBS]])
def test_nothing_changes_without_a_local_disk(instance: Instance, others: list[str]) -> None:
    names = [instance.disk(model) for model in others]
    assert instance.boot() == "local disks: the instance has none; Docker stays on the root volume"
    assert instance.stays()
    assert not instance.calls("systemctl")
    assert not any(instance.run("blkid", "-p", f"/dev/{name}").stdout for name in names)


def test_one_disk_takes_all_files_of_docker(instance: Instance) -> None:
    instance.disk(EBS)
    name = instance.disk()
    assert instance.boot() == f"local disks: Docker's files are on /dev/{name}, 0 GB"
    assert [instance.device(folder) for folder in FOLDERS] == [f"/dev/{name}"] * 2
    assert instance.has_all()
    assert instance.shell("findmnt -no FSTYPE,OPTIONS /var/lib/docker").split(",")[0].split()[0] == "xfs"
    assert "noatime" in instance.shell("findmnt -no OPTIONS /var/lib/docker")
    assert instance.calls("systemctl")[-1] == "stop docker.socket docker containerd"
    assert not instance.calls("mdadm")


@pytest.mark.parametrize("disks", [2, 8])
def test_several_disks_become_one(instance: Instance, disks: int) -> None:
    array = with_array(instance, disks)
    instance.boot()
    assert [instance.device(folder) for folder in FOLDERS] == [f"/dev/{array}"] * 2
    assert instance.has_all()
    [created] = [call for call in instance.calls("mdadm") if call.startswith("--create")]
    names = " ".join(sorted(f"/dev/{name}" for name in instance.loops if name != array))
    assert f"--level=0 --raid-devices={disks}" in created
    assert " ".join(sorted(created.split()[-disks:])) == names
    assert not instance.calls("dnf")


@pytest.mark.parametrize("mdadm", ["absent", "failing", "half"])
def test_one_disk_is_used_without_an_array(instance: Instance, mdadm: str) -> None:
    names = [instance.disk(), instance.disk()]
    if mdadm == "absent":
        instance.works("mdadm")
    if mdadm == "half":  # it has written its superblocks
        instance.program("mdadm", '[ $1 != --create ] || mkfs.ext4 -qF "${@: -2:1}"; exit 1')
    instance.boot()
    assert instance.device() in [f"/dev/{name}" for name in names]
    assert instance.has_all()
    assert len(instance.calls("dnf")) == (mdadm == "absent")


def test_mdadm_is_installed_for_several_disks(instance: Instance) -> None:
    array = with_array(instance, 2)
    mdadm = instance.folder / "bin" / "mdadm"
    mdadm.rename(instance.folder / "package")
    instance.program("dnf", f"mv {instance.folder}/package {mdadm}")
    instance.boot()
    assert instance.device() == f"/dev/{array}"
    assert len(instance.calls("dnf")) == 1


CONTENTS = {
    "ext4": "mkfs.ext4 -qF $DISK",
    "xfs": "mkfs.xfs -q $DISK",
    "xfs of another label": "mkfs.xfs -q -L data $DISK",
    "label without xfs": "mkfs.ext4 -qF -L ray-on-ecs $DISK",
    "swap": "mkswap -q $DISK",
    "MBR": "echo , | sfdisk -q --label dos $DISK",
    "GPT": "echo , | sfdisk -q --label gpt $DISK",
    "empty GPT": "echo label: gpt | sfdisk -q $DISK",
    "LUKS": r"printf 'LUKS\xba\xbe\0\x01' | dd of=$DISK conv=notrunc status=none",
}


@pytest.mark.parametrize("content", CONTENTS)
def test_a_disk_with_content_is_left_alone(instance: Instance, content: str) -> None:
    disk = f"/dev/{instance.disk()}"
    instance.shell(CONTENTS[content].replace("$DISK", disk))
    before = instance.shell(f"head -c 32M {disk} | sha256sum")
    output = instance.boot()
    assert output == f"local disks: {disk} are not empty; Docker stays on the root volume"
    assert instance.stays()
    assert instance.shell(f"head -c 32M {disk} | sha256sum") == before


def test_the_empty_one_of_two_disks_is_used(instance: Instance) -> None:
    full, empty = (f"/dev/{instance.disk()}" for _ in range(2))
    instance.shell(f"mkfs.ext4 -qF {full}")
    before = instance.shell(f"head -c 32M {full} | sha256sum")
    instance.boot()
    assert instance.device() == empty
    assert instance.shell(f"head -c 32M {full} | sha256sum") == before


def test_a_disk_below_the_root_volume_is_left_alone(instance: Instance) -> None:
    disk = f"/dev/{instance.disk()}"
    instance.shell("mount -o remount,size=1g /var/lib")
    assert instance.boot() == f"local disks: {disk} is smaller than the root volume; Docker stays on the root volume"
    assert instance.stays()
    assert not instance.run("blkid", "-p", disk).stdout


FAULTS = [
    ("mkfs.xfs", ""),
    ("mount", "noatime"),
    ("mount", "/var/lib/containerd"),
    ("mount", "/var/lib/docker"),
    ("cp", "/var/lib/containerd"),
    ("cp", "/var/lib/docker"),
    ("mv", "containerd"),
    ("mv", "docker"),
    ("systemctl", "stop"),
    ("blockdev", ""),
    ("blkid", ""),
]


@pytest.mark.parametrize(("name", "when"), FAULTS)
def test_any_failure_leaves_docker_on_root(instance: Instance, name: str, when: str) -> None:
    disk = f"/dev/{instance.disk()}"
    if name == "systemctl":
        (instance.folder / "stuck").touch()
    else:
        instance.fails(name, when)
    assert instance.boot().endswith("; Docker stays on the root volume")
    assert instance.stays()
    if name == "systemctl":
        (instance.folder / "stuck").unlink()
    else:
        instance.works(name)
    instance.boot()
    assert instance.device() == disk
    assert instance.has_all()


@pytest.mark.parametrize("folder", FOLDERS)
def test_array_that_takes_no_files_is_unmounted(instance: Instance, folder: str) -> None:
    with_array(instance, 2)
    instance.fails("mount", f"/var/lib/{folder}")
    assert instance.boot().endswith(
        f"/var/lib/{folder} can't be moved to /dev/md/ray-on-ecs; Docker stays on the root volume"
    )
    assert instance.stays()


ARRAY_FAULTS = [*FAULTS[:8], ("blockdev", "ray-on-ecs")]


@pytest.mark.parametrize(("name", "when"), ARRAY_FAULTS)
def test_disks_of_a_failed_array_are_used_again(instance: Instance, name: str, when: str) -> None:
    array = with_array(instance, 2)
    instance.fails(name, when)
    assert instance.boot().endswith("; Docker stays on the root volume")
    assert instance.stays()
    assert "--stop /dev/md/ray-on-ecs" in instance.calls("mdadm")
    assert not any(instance.run("blkid", "-p", f"/dev/{disk}").stdout for disk in instance.loops)
    instance.works(name)
    instance.boot()
    assert [instance.device(folder) for folder in FOLDERS] == [f"/dev/{array}"] * 2
    assert instance.has_all()


def test_disks_of_an_array_below_the_root_volume_are_empty(instance: Instance) -> None:
    with_array(instance, 2)
    instance.shell("mount -o remount,size=1g /var/lib")
    for _ in range(2):  # the next boot says so, too
        assert "/dev/md/ray-on-ecs is smaller than the root volume" in instance.boot()
        assert instance.stays()
        assert not any(instance.run("blkid", "-p", f"/dev/{disk}").stdout for disk in instance.loops)


@pytest.mark.parametrize("moment", ["mkfs.xfs", "mount"])
def test_array_of_a_killed_script_is_used(instance: Instance, moment: str) -> None:
    array = with_array(instance, 2)
    instance.program(moment, "kill -9 $PPID")
    assert instance.run("bash", "-s", text=MOVE).returncode
    instance.works(moment)
    instance.reboot()
    instance.boot()
    assert instance.device() == f"/dev/{array}"
    assert instance.has_all()


def test_content_of_an_array_of_this_name_is_left_alone(instance: Instance) -> None:
    array = with_array(instance, 2)
    instance.shell(f"mkfs.ext4 -qF /dev/{array}; mkdir /dev/md; ln -s ../{array} /dev/md/ray-on-ecs")
    for disk in instance.loops[:2]:
        instance.shell(f"mkswap -q /dev/{disk}")
    assert "are not empty" in instance.boot()
    assert "ext4" in instance.run("blkid", "-p", f"/dev/{array}").stdout


def test_array_moves_back_if_docker_does_not_start(instance: Instance) -> None:
    with_array(instance, 2)
    instance.boot()
    instance.run("bash", "-s", "undo", text=MOVE)
    assert instance.stays()
    assert not any(instance.run("blkid", "-p", f"/dev/{disk}").stdout for disk in instance.loops)


KILLED = [
    ("mkfs.xfs", ""),
    ("mount", "noatime"),
    ("cp", "containerd"),
    ("cp", "docker"),
    ("mv", "docker"),
    ("mount", "/var/lib/containerd"),
    ("mount", "/var/lib/docker"),
]


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("name", "when"), KILLED)
def test_killed_script_goes_on_at_the_next_boot(instance: Instance, name: str, when: str, done: bool) -> None:
    disk = f"/dev/{instance.disk()}"
    act = f'{shutil.which(name)} "$@"' if done else ":"
    instance.program(
        name, f'case "$*" in *"{when}"*) {act}; kill -9 $PPID ;; *) exec {shutil.which(name)} "$@" ;; esac'
    )
    assert instance.run("bash", "-s", text=MOVE).returncode
    assert instance.has_all()
    instance.reboot()
    instance.works(name)
    instance.boot()
    assert instance.device() == disk
    assert instance.has_all()


def test_reboot_finds_the_files_again(instance: Instance) -> None:
    disk = f"/dev/{instance.disk()}"
    instance.boot()
    instance.shell("echo new > /var/lib/docker/volumes/new")
    instance.reboot()
    assert instance.stays()
    (instance.folder / "calls").unlink()
    instance.boot()
    assert instance.device() == disk
    assert instance.shell("cat /var/lib/docker/volumes/new") == "new"
    # A stop would take Docker's own start out of the boot.
    assert instance.calls("systemctl") == ["is-active docker containerd"]


@pytest.mark.parametrize("assembled", ["by udev", "by the script"])
def test_reboot_finds_the_array_again(instance: Instance, assembled: str) -> None:
    array = with_array(instance, 2)
    instance.boot()
    instance.shell("echo new > /var/lib/docker/volumes/new")
    instance.reboot()
    if assembled == "by the script":
        instance.shell("rm -r /dev/md /dev/md127")
        instance.program("mdadm", f"ln -s {array} /dev/md127")
    instance.boot()
    assert instance.device() == f"/dev/{array}"
    assert instance.shell("cat /var/lib/docker/volumes/new") == "new"


def test_empty_disk_after_a_stop_starts_anew(instance: Instance) -> None:
    disk = f"/dev/{instance.disk()}"
    instance.boot()
    instance.shell("echo new > /var/lib/docker/volumes/new")
    instance.reboot()
    instance.shell(f"dd if=/dev/zero of={disk} bs=1M count=8 conv=notrunc status=none; blkid -g")
    instance.boot()
    assert instance.device() == disk
    assert instance.has_all()
    assert not instance.shell("ls /var/lib/docker/volumes")


@pytest.mark.parametrize(("status", "moves"), [(0, True), (124, True), (1, False), (4, False)])
def test_docker_that_does_not_start_moves_back(instance: Instance, status: int, moves: bool) -> None:
    disk = f"/dev/{instance.disk()}"
    (instance.folder / "starts").write_text(f"{status}\n")
    assert instance.run("bash", "-s", text=move_docker()).returncode == 0
    calls = instance.calls("systemctl")
    assert "enable --now ray-on-ecs-local-disks" in calls
    assert instance.has_all()
    assert instance.shell(f"cat {instance.folder}/agent") == "waiting"
    if moves:
        assert instance.device() == disk
        assert calls[-2] == "start docker"
    else:
        assert instance.stays()
        assert calls[-3:-1] == ["stop docker.socket docker containerd", "start --no-block docker"]
        output = instance.shell("cat /var/lib/ray-on-ecs/local-disks")
        assert output == f"local disks: Docker did not start on {disk}; Docker stays on the root volume"


def test_undo_without_a_local_disk_changes_nothing(instance: Instance) -> None:
    instance.run("bash", "-s", "undo", text=MOVE)
    assert instance.stays()
    assert not instance.calls("systemctl")


def test_mount_of_the_user_at_dockers_folder_stays(instance: Instance) -> None:
    instance.disk()
    own = f"/dev/{instance.disk(EBS)}"
    instance.shell(f"mkfs.ext4 -qF {own}; mount {own} /var/lib/docker; echo image > /var/lib/docker/image")
    instance.fails("mount", "/var/lib/docker")
    instance.boot()
    assert instance.device() == own
    assert instance.shell("cat /var/lib/docker/image") == "image"


def test_the_unit_is_correct_and_before_docker(instance: Instance) -> None:
    instance.disk()
    instance.run("bash", "-s", text=move_docker())
    unit = instance.shell("cat /etc/systemd/system/ray-on-ecs-local-disks.service").splitlines()
    assert {"Type=oneshot", "RemainAfterExit=yes", "Before=containerd.service docker.service"} <= set(unit)
    assert f"ExecStart={SCRIPT}" in unit
    assert instance.shell(f"cat {SCRIPT}") == MOVE.strip()
