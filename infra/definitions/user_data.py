"""User data of the instances: configuration of the ECS agent; and their machine image."""

from __future__ import annotations

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
# Public SSM parameters of AWS, and the prefix of an image ID that names one.
AMI_PARAMETER = "/aws/service/ecs/optimized-ami/amazon-linux-2023/{variant}recommended/image_id"
RESOLVE = "resolve:ssm:"


def machine_image(*, gpu: bool) -> str:
    """Image ID that EC2 resolves at each launch to the latest ECS-optimized AMI; the GPU variant has NVIDIA's driver.

    https://docs.aws.amazon.com/autoscaling/ec2/userguide/using-systems-manager-parameters.html
    """
    return RESOLVE + AMI_PARAMETER.format(variant="gpu/" if gpu else "")


def user_data(cluster_name: str) -> str:
    """User data script, which configures the ECS agent at the first boot.

    https://docs.aws.amazon.com/AmazonECS/latest/developerguide/ecs-agent-config.html
    """
    agent = {
        "ECS_CLUSTER": cluster_name,
        "ECS_ENABLE_TASK_IAM_ROLE": "true",
        # Tasks get the credentials of their task role from the agent, and must not get the instance role's.
        "ECS_AWSVPC_BLOCK_IMDS": "true",
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
        # At a Spot interruption notice, the agent stops the tasks at once, which leaves them the two minutes of the
        # notice. Without effect on on-demand instances.
        "ECS_ENABLE_SPOT_INSTANCE_DRAINING": "true",
    }
    lines = [f"{key}={value}" for key, value in agent.items()]
    return "\n".join(["#!/bin/bash", "cat >> /etc/ecs/ecs.config <<'EOF'", *lines, "EOF", DESCRIBE_INSTANCE])
