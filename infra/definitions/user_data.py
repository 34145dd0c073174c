"""What an instance starts with: AWS's machine image for ECS, and the configuration of the ECS agent on it."""

from __future__ import annotations

# The root disk's name on AWS's machine images for ECS.
ROOT_DEVICE = "/dev/xvda"
# Where the instance leaves what it is, for its task: that can't ask the metadata service.
INSTANCE_DIR, INSTANCE_FILE = "/var/lib/ray-on-ecs", "instance.json"
DESCRIBE_INSTANCE = f"""
metadata=http://169.254.169.254/latest
token=$(curl -sS -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' $metadata/api/token)
ask() {{ curl -sS --retry 5 -H "X-aws-ec2-metadata-token: $token" "$metadata/meta-data/$1"; }}
mkdir -p {INSTANCE_DIR}
printf '{{"instance_type": "%s", "zone": "%s", "market": "%s", "instance_id": "%s"}}\\n' \\
  "$(ask instance-type)" "$(ask placement/availability-zone)" "$(ask instance-life-cycle)" "$(ask instance-id)" \\
  > {INSTANCE_DIR}/{INSTANCE_FILE}
"""
AMI_PARAMETER = "/aws/service/ecs/optimized-ami/amazon-linux-2023/{variant}recommended/image_id"


def ami_parameter(*, gpu: bool) -> str:
    """Public parameter with the ID of AWS's ECS-optimized image; the GPU one brings the NVIDIA driver and runtime."""
    return AMI_PARAMETER.format(variant="gpu/" if gpu else "")


def user_data(cluster_name: str) -> str:
    """Script of an instance's first start, which configures the ECS agent.

    https://docs.aws.amazon.com/AmazonECS/latest/developerguide/ecs-agent-config.html
    """
    agent = {
        "ECS_CLUSTER": cluster_name,
        "ECS_ENABLE_TASK_IAM_ROLE": "true",
        # Tasks get their own role's credentials from the agent and have no business with the instance's.
        "ECS_AWSVPC_BLOCK_IMDS": "true",
        # The image is large and named by its digest: one pull an instance. Unlike prefer-cached, this setting leaves
        # the agent to clean up the images of earlier builds.
        "ECS_IMAGE_PULL_BEHAVIOR": "once",
        # What a stopped task leaves, its volumes with Ray's files among it, is kept for three hours otherwise.
        "ECS_ENGINE_TASK_CLEANUP_WAIT_DURATION": "10m",
        "ECS_RESERVED_MEMORY": "256",
        # A spot instance that EC2 reclaims has its tasks stopped at once, with the two minutes of the notice; elsewhere
        # this does nothing.
        "ECS_ENABLE_SPOT_INSTANCE_DRAINING": "true",
    }
    lines = [f"{key}={value}" for key, value in agent.items()]
    return "\n".join(["#!/bin/bash", "cat >> /etc/ecs/ecs.config <<'EOF'", *lines, "EOF", DESCRIBE_INSTANCE])
