"""Local NVMe disks of the instances for Docker's files: images, containers and the volumes of tasks.

Their data is encrypted by the disks' hardware, and is gone with the instance.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ssd-instance-store.html
"""

from __future__ import annotations

from pathlib import Path

UNIT = "ray-on-ecs-local-disks"
SCRIPT = f"/usr/local/bin/{UNIT}"
# Mount point of the disks' file system, as in the script.
MOUNTED = "/mnt/local-disks"
MOVE = Path(__file__).with_suffix(".sh").read_text()
# cloud-init runs user data before the ECS agent starts, and Docker may be up already. A start of Docker that has not
# ended after a minute, e.g. one that waits for cloud-init, goes on. At a later boot the unit comes before Docker.
# The agent is a part of Docker's unit: a stop of Docker cancels its start, which waits for cloud-init.
# https://github.com/aws/amazon-ecs-agent/blob/master/packaging/amazon-linux-ami-integrated/ecs.service
RUN = f"""
chmod +x {SCRIPT}
cat > /etc/systemd/system/{UNIT}.service <<'EOF'
[Unit]
Description=Docker on the local NVMe disks
Before=containerd.service docker.service
[Service]
Type=oneshot
RemainAfterExit=yes
TimeoutStartSec=300
ExecStart={SCRIPT}
[Install]
WantedBy=multi-user.target
EOF
systemctl enable --now {UNIT}
timeout 60 systemctl start docker
(($? == 0 || $? == 124)) || {{ {SCRIPT} undo; systemctl start --no-block docker; }}
systemctl start --no-block ecs
"""


def move_docker() -> str:
    """Shell commands that move Docker's files to the local disks at this boot and at each later one."""
    return f"\ncat > {SCRIPT} <<'EOF'\n{MOVE}EOF{RUN}"
