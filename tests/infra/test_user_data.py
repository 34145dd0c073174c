"""What an instance starts with."""

from __future__ import annotations

import pytest

from infra.definitions.user_data import ami_parameter, user_data


def test_the_agent_joins_the_cluster_and_keeps_tasks_from_the_instances_role() -> None:
    assert user_data("ray-cluster").splitlines() == [
        "#!/bin/bash",
        "cat >> /etc/ecs/ecs.config <<'EOF'",
        "ECS_CLUSTER=ray-cluster",
        "ECS_ENABLE_TASK_IAM_ROLE=true",
        "ECS_AWSVPC_BLOCK_IMDS=true",
        "ECS_IMAGE_PULL_BEHAVIOR=once",
        "ECS_ENGINE_TASK_CLEANUP_WAIT_DURATION=10m",
        "ECS_RESERVED_MEMORY=256",
        "EOF",
    ], "an instance that joins no cluster is paid for and does nothing"


@pytest.mark.parametrize(("gpu", "variant"), [(False, ""), (True, "gpu/")])
def test_the_image_is_amazon_linux_2023_for_ecs(gpu: bool, variant: str) -> None:
    assert ami_parameter(gpu=gpu) == (
        f"/aws/service/ecs/optimized-ami/amazon-linux-2023/{variant}recommended/image_id"
    ), "Amazon Linux 2 has no NVIDIA driver for CUDA 13 and gets no updates"
