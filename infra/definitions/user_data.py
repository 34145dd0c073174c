"""User data of the instances: configuration of the ECS agent, notices of EC2; and their machine image."""

from __future__ import annotations

import base64

from infra.definitions.efa import load_driver
from infra.definitions.local_disks import move_docker
from infra.errors import Refusal
from ray_on_ecs.contract import LIFECYCLE_STATE, NOTICES_FILE, REBALANCE, SCHEDULED_EVENTS, SPOT_ACTION

# Root device of Amazon ECS-optimized AMIs.
ROOT_DEVICE = "/dev/xvda"
# The instance writes its type, zone, market and ID, its launch (pendingTime of its identity document) and the boot of
# its kernel (Unix time) here, since tasks have no access to the metadata service.
INSTANCE_DIR, INSTANCE_FILE = "/var/lib/ray-on-ecs", "instance.json"
DESCRIBE_INSTANCE = f"""
metadata=http://169.254.169.254/latest
token=$(curl -sS -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' $metadata/api/token)
get() {{ curl -sS --retry 5 -H "X-aws-ec2-metadata-token: $token" "$metadata/$1"; }}
ask() {{ get "meta-data/$1"; }}
launched=$(get dynamic/instance-identity/document | sed -nE 's/.*"pendingTime" *: *"([^"]+)".*/\\1/p')
booted=$(sed -n 's/^btime //p' /proc/stat)
mkdir -p {INSTANCE_DIR}
printf '{{"instance_type": "%s", "zone": "%s", "market": "%s", "instance_id": "%s", '\\
'"launched": "%s", "booted": "%s"}}\\n' \\
  "$(ask instance-type)" "$(ask placement/availability-zone)" "$(ask instance-life-cycle)" "$(ask instance-id)" \\
  "$launched" "$booted" \\
  > {INSTANCE_DIR}/{INSTANCE_FILE}
"""
# Session Manager's agent starts before user data runs. If it does not reach AWS, as where the NAT instance starts with
# the head, it waits for five minutes and then asks every ten.
# https://github.com/aws/amazon-ssm-agent/blob/mainline/agent/hibernation/hibernation.go
WAKE_SESSION_MANAGER = """
reach="curl -so /dev/null -m 5 https://ssm.$(ask placement/region).$(ask services/domain)/"
$reach || systemd-run -q bash -c "until $reach; do sleep 2; done; systemctl restart amazon-ssm-agent"
"""
# A unit of systemd passes on the notices of EC2 and EC2 Auto Scaling each second, as text and without a decision
# (`ray_on_ecs.node.notice`). An answer that fails changes nothing, and a file that is not written any longer is old.
NOTICES_UNIT = "ray-on-ecs-notices"
NOTICES_SCRIPT = f"/usr/local/bin/{NOTICES_UNIT}"
PASS_ON_NOTICES = rf"""#!/bin/bash
metadata=http://169.254.169.254/latest
file={INSTANCE_DIR}/{NOTICES_FILE}
backslash='\' quote='"'
declare -A answers
token= renew_at=0 look_at=0
renew() {{
  local new
  new=$(curl -sf -m 2 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 21600' $metadata/api/token) || return
  token=$new renew_at=$((SECONDS + 3600))
}}
ask() {{
  local answer
  answer=$(curl -s -m 2 -w '\n%{{http_code}}' -H "X-aws-ec2-metadata-token: $token" "$metadata/meta-data/$1") || return
  case ${{answer##*$'\n'}} in
    200) answers[$1]=${{answer%$'\n'*}} ;;
    404) unset "answers[$1]" ;;
    401) renew_at=0; return 1 ;;
    *) return 1 ;;
  esac
}}
write() {{
  local path text comma=
  printf '{{'
  for path in "${{!answers[@]}}"; do
    text=${{answers[$path]//[[:cntrl:]]/ }}
    text=${{text//"$backslash"/"$backslash$backslash"}}
    printf '%s"%s": "%s"' "$comma" "$path" "${{text//"$quote"/"$backslash$quote"}}"
    comma=', '
  done
  printf '}}\n'
}}
while true; do
  ((SECONDS < renew_at)) || renew
  heard=
  for path in {SPOT_ACTION} {REBALANCE} {LIFECYCLE_STATE}; do ask $path && heard=1; done
  ((SECONDS < look_at)) || {{ ask {SCHEDULED_EVENTS} && look_at=$((SECONDS + 60)); }}
  [[ $heard ]] && write > $file.new && mv -f $file.new $file
  sleep 1
done
"""
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-add-user-data.html
MOST_BYTES = 16 * 1024
# Public SSM parameters of AWS, and the prefix of an image ID that names one.
AMI_PARAMETER = "/aws/service/ecs/optimized-ami/amazon-linux-2023/{variant}recommended/image_id"
RESOLVE = "resolve:ssm:"


def run_unit(unit: str, description: str, *options: str) -> str:
    """Shell commands that start the script of a systemd unit now and at each boot, and again whenever it ends."""
    script = f"/usr/local/bin/{unit}"
    service = ["[Service]", f"ExecStart={script}", "Restart=always", "RestartSec=1", *options]
    return "\n".join(
        [
            f"chmod +x {script}",
            f"cat > /etc/systemd/system/{unit}.service <<'EOF'",
            *("[Unit]", f"Description={description}", "StartLimitIntervalSec=0"),
            *service,
            *("[Install]", "WantedBy=multi-user.target", "EOF"),
            f"systemctl enable --now --no-block {unit}\n",
        ]
    )


def encoded(text: str) -> str:
    """User data as EC2 takes it; a Refusal if there is too much of it."""
    if (size := len(text.encode())) > MOST_BYTES:
        raise Refusal("user data", f"{size} bytes are more than the {MOST_BYTES} that EC2 takes; use fewer settings")
    return base64.b64encode(text.encode()).decode()


def machine_image(*, gpu: bool) -> str:
    """Image ID that EC2 resolves at each launch to the latest ECS-optimized AMI; the GPU variant has NVIDIA's driver.

    https://docs.aws.amazon.com/autoscaling/ec2/userguide/using-systems-manager-parameters.html
    """
    return RESOLVE + AMI_PARAMETER.format(variant="gpu/" if gpu else "")


def user_data(cluster_name: str, mounts: str = "", *, efa_devices: int = 0, local_disks: bool = False) -> str:
    """User data script, which configures the ECS agent at the first boot, and local disks before it starts.

    `mounts` are the commands that mount file systems, before the agent has a cluster: an instance without them does not
    join. Mountpoint's cache is on the local disks.

    https://docs.aws.amazon.com/AmazonECS/latest/developerguide/ecs-agent-config.html
    """
    agent = {
        "ECS_CLUSTER": cluster_name,
        "ECS_ENABLE_TASK_IAM_ROLE": "true",
        # Tasks get the credentials of their task role from the agent, and must not get the instance role's.
        "ECS_AWSVPC_BLOCK_IMDS": "true",
        # ECS places tasks with Docker's security options on instances with this attribute; the agent does not use it.
        # https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_ContainerDefinition.html
        "ECS_SELINUX_CAPABLE": "true",
        # The image is large and referenced by digest, so one pull per instance is enough. Unlike `prefer-cached`, this
        # setting lets the agent delete images of earlier builds.
        "ECS_IMAGE_PULL_BEHAVIOR": "once",
        # By default the agent keeps a stopped task's containers and volumes, with Ray's files, for three hours.
        "ECS_ENGINE_TASK_CLEANUP_WAIT_DURATION": "10m",
        # Docker unpacks the image, some 7 GB, for minutes, and answers late while the disk is busy. By the defaults of
        # 1, 4 and 3 minutes the task would fail, and after three of these the deployment.
        # https://github.com/aws/amazon-ecs-agent/issues/4308
        **dict.fromkeys(
            ("ECS_IMAGE_PULL_INACTIVITY_TIMEOUT", "ECS_CONTAINER_CREATE_TIMEOUT", "ECS_CONTAINER_START_TIMEOUT"), "10m"
        ),
        "ECS_RESERVED_MEMORY": "256",
        # At a Spot interruption notice, the agent has ECS stop the task, once the worker has released it. Without
        # effect on on-demand instances.
        "ECS_ENABLE_SPOT_INSTANCE_DRAINING": "true",
    }
    lines = [f"{key}={value}" for key, value in agent.items()]
    configure = ["cat >> /etc/ecs/ecs.config <<'EOF'", *lines, "EOF"]
    notices = ["", f"cat > {NOTICES_SCRIPT} <<'EOF'", f"{PASS_ON_NOTICES}EOF"]
    unit = run_unit(NOTICES_UNIT, "Notices of EC2 for the containers")
    driver = [load_driver(efa_devices)] if efa_devices else []
    disks = [move_docker()] if local_disks else []
    first = ["#!/bin/bash", *disks, *([mounts] if mounts else [])]
    return "\n".join([*first, *configure, DESCRIBE_INSTANCE, WAKE_SESSION_MANAGER, *driver, *notices, unit])
