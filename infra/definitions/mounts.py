"""File systems that every instance mounts before it joins the cluster: shell for its user data.

All are below one folder of the instance, which its task has as /mnt. Docker gives a task the mounts of the moment in
which it starts, and ECS has no setting to pass on later ones (rslave): a file system that is mounted again, since
Mountpoint has died, is seen by the next task.
https://docs.docker.com/engine/storage/bind-mounts/#configure-bind-propagation
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from infra.definitions import local_disks
from infra.definitions.sizing import PREFETCH_MIB
from ray_on_ecs.contract import EFS_MOUNT, FSX_MOUNT

UNIT = "ray-on-ecs-mounts"
SCRIPT = f"/usr/local/bin/{UNIT}"
# Folder of the instance, /mnt of its task (contract.MOUNTS_DIR), and Mountpoint's cache on its root volume, or
# on its local disks where Docker's files are.
HOST_DIR, CACHE_DIR = "/mnt/ray-on-ecs", "/var/cache/ray-on-ecs"
LOCAL_CACHE_DIR = f"{local_disks.MOUNTED}/cache"
# All of Mountpoint's caches together take this part of the disk space that is free when they start.
CACHE_PART = 4
# An instance that has not mounted everything by then shuts down, and Auto Scaling replaces it. `status` tells of
# instances that end within ten minutes: see ray_on_ecs/starting/launches.py.
GIVE_UP_SECONDS = 300
USER = 1000  # of the containers


@dataclass(frozen=True, kw_only=True)
class LustreFileSystem:
    """FSx for Lustre file system; an `is_new` one has a root folder that only root can write."""

    dns_name: str
    mount_name: str
    is_new: bool = False


@dataclass(frozen=True, kw_only=True)
class Mounts:
    """File systems of all nodes: folders of S3 (`bucket` or `bucket/prefix`) by name, FSx for Lustre, and EFS by ID."""

    s3: Mapping[str, str] = field(default_factory=dict)
    lustre: LustreFileSystem | None = None
    efs: str = ""


def mount_all(mounts: Mounts) -> str:
    """Shell commands that mount everything now and at each boot, before the ECS agent starts; empty without mounts.

    The agent requires the unit, so that an instance without its file systems does not join. The script goes on, and
    mounts S3 again when Mountpoint has died, also then without an effect on tasks that run.
    """
    commands = _commands(mounts)
    if not commands:
        return ""
    unit = [
        *("[Unit]", "Description=File systems of the containers", "StartLimitIntervalSec=0"),
        *("Wants=network-online.target", f"After=network-online.target {local_disks.UNIT}.service"),
        "Before=ecs.service",
        # A script that systemd starts again leaves Mountpoint's processes alone.
        *("[Service]", "Type=notify", "NotifyAccess=all", "TimeoutStartSec=infinity", "KillMode=process"),
        *("Restart=always", "RestartSec=1", "StandardOutput=journal+console", "StandardError=journal+console"),
        *(f"ExecStart={SCRIPT}", "[Install]", "RequiredBy=ecs.service"),
    ]
    return "\n".join(
        [
            *(f"cat > {SCRIPT} <<'EOF'", script(mounts), "EOF", f"chmod +x {SCRIPT}"),
            *(f"cat > /etc/systemd/system/{UNIT}.service <<'EOF'", *unit, "EOF"),
            f"systemctl enable --now {UNIT} || exit 1",
        ]
    )


def script(mounts: Mounts) -> str:
    """Script of the unit. `systemd-notify` tells that everything is mounted, until when the agent waits."""
    commands, packages = _commands(mounts), " ".join(_packages(mounts))
    # Quoted, as bash would take a mount named esac for the end of the list.
    cases = "\n".join(f'    "{name}") {command} ;;' for name, command in commands.items())
    watched = " ".join(mounts.s3)
    return rf"""#!/bin/bash
root={HOST_DIR} cache={CACHE_DIR} log=/run/{UNIT}.log mounted=/run/{UNIT}.done
export UNSTABLE_MOUNTPOINT_MAX_PREFETCH_WINDOW_SIZE={PREFETCH_MIB * 2**20}
say() {{ echo "{UNIT}: $*"; }}
attempt() {{ timeout -k 5 120 "$@" > $log 2>&1 < /dev/null; }}
wait_or_end() {{
  say "$1: $(tail -n 1 $log)"
  if [[ ! -e $mounted ]] && ((SECONDS >= {GIVE_UP_SECONDS})); then
    say "$1 failed for {GIVE_UP_SECONDS // 60} minutes: this instance does not join, and shuts down (docs/mounts.md)"
    shutdown -h now
    exit 1
  fi
  sleep 5
}}
is_mounted() {{ mountpoint -q "$root/$1" 2> /dev/null; }}
mount_it() {{
  local dir=$root/$1
  umount -l "$dir" 2> /dev/null
  mkdir -p "$dir" 2> $log || return
  case $1 in
{cases}
  esac && is_mounted "$1"
}}
mountpoint -q {local_disks.MOUNTED} && cache={LOCAL_CACHE_DIR}
mkdir -p $cache && chmod 700 $cache
until attempt rpm -q {packages} || attempt dnf install -y {packages}; do wait_or_end "{packages}"; done
for name in {" ".join(commands)}; do
  until is_mounted "$name"; do mount_it "$name" || wait_or_end "$name"; done
  say "$name is mounted"
done
touch $mounted
systemd-notify --ready
while sleep 1; do
  for name in {watched}; do
    is_mounted "$name" && continue
    say "$name is lost, and is mounted again"
    mount_it "$name" || wait_or_end "$name"
  done
done"""


def _packages(mounts: Mounts) -> list[str]:
    """Packages of Amazon Linux 2023.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/mountpoint-installation.html
    https://docs.aws.amazon.com/fsx/latest/LustreGuide/install-lustre-client.html
    https://docs.aws.amazon.com/efs/latest/ug/installing-amazon-efs-utils.html
    """
    wanted = {"mount-s3": mounts.s3, "lustre-client": mounts.lustre, "amazon-efs-utils": mounts.efs}
    return [package for package, uses in wanted.items() if uses]


def _commands(mounts: Mounts) -> dict[str, str]:
    """Commands that mount a file system at $dir, by name."""
    commands = {name: _mount_s3(name, source, len(mounts.s3)) for name, source in mounts.s3.items()}
    if lustre := mounts.lustre:
        source = shlex.quote(f"{lustre.dns_name}@tcp:/{lustre.mount_name}")
        owner = f' && chown {USER}:{USER} "$dir"' if lustre.is_new else ""
        commands[FSX_MOUNT] = f'attempt mount -t lustre -o noatime,flock {source} "$dir"{owner}'
    if mounts.efs:
        # A file system policy may admit only clients with IAM, and without one EFS admits all.
        # https://docs.aws.amazon.com/efs/latest/ug/iam-access-control-nfs-efs.html
        commands[EFS_MOUNT] = f'attempt mount -t efs -o tls,iam {mounts.efs}:/ "$dir"'
    return commands


def _mount_s3(name: str, source: str, number: int) -> str:
    """Command of Mountpoint, which finds the bucket's region, and whose prefix ends with a slash.

    https://github.com/awslabs/mountpoint-s3/blob/main/doc/CONFIGURATION.md
    """
    bucket, _, prefix = source.strip("/").partition("/")
    of_prefix = f" --prefix {shlex.quote(f'{prefix}/')}" if prefix else ""
    free = f"$(($(df --output=avail -m $cache/{name} | tail -n 1) / {CACHE_PART * number}))"
    return (
        f"mkdir -p $cache/{name} && attempt mount-s3 --read-only --allow-other --uid {USER} --gid {USER}{of_prefix} "
        f'--cache $cache/{name} --max-cache-size "{free}" {bucket} "$dir"'
    )
