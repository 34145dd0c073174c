"""The whole program's stacks, each deployed once for all tests that look at it."""

from __future__ import annotations

import json
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pulumi
import pytest

from tests.infra.fake_aws import ACCOUNT, DIGEST, REGION, Cloud
from tests.infra.fake_file_systems import EFS, LUSTRE

ROOT = Path(__file__).parents[2]
KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/1a2b"
READY_IMAGE = f"public.example/ray@{DIGEST}"
TASK_POLICIES = [
    f"arn:aws:iam::{ACCOUNT}:policy/teams/read-features",
    "arn:aws:iam::aws:policy/AmazonSSMReadOnlyAccess",
]
INSTANCE_POLICY = f"arn:aws:iam::{ACCOUNT}:policy/session-key"
# All optional parts.
EVERYTHING = {
    "workerInstanceTypes": "g5.xlarge,g6.xlarge",
    "availabilityZones": "us-west-2c,us-west-2a",
    "maxWorkers": "4",
    "spot": "true",
    "onDemandWorkers": "1",
    "cpuWorkerInstanceTypes": "c6i.2xlarge",
    "cpuWorkerCount": "1",
    "maxCpuWorkers": "3",
    "idleTimeoutMinutes": "60",
    "sleepAfterMinutes": "120",
    "alertEmail": "team@example.com",
    "natGateway": "false",
    "objectVersionDays": "7",
    "tags": "team=vision,cost-center=42",
    "permissionsBoundary": f"arn:aws:iam::{ACCOUNT}:policy/boundary",
    "rolePath": "/teams/ml/",
    "kmsKeyArn": KEY,
}
# Attributes of the Cloud of each stack; the tests combine settings that don't affect each other.
STACKS: dict[str, dict[str, Any]] = {
    "default": {},
    "sleeping": {"config": {"sleepAfterMinutes": "60"}},
    "everything": {"config": EVERYTHING},
    "renamed": {
        "config": EVERYTHING,
        "stack": "Team_A." + 93 * "a",
        "project": "vision",
        "kept": {"zones": "us-west-2c"},
    },
    "in China": {
        "config": {
            **EVERYTHING,
            "permissionsBoundary": "",
            "dataBuckets": "my-data",
            "imageBuild": "codebuild",
            "kmsKeyArn": KEY.replace("arn:aws:", "arn:aws-cn:"),
        },
        "partition": "aws-cn",
    },
    "pools": {
        "config": {
            "availabilityZones": "us-west-2c,us-west-2a",
            "maxWorkers": "4",
            "rootVolumeGib": "200",
            "cpuWorkerInstanceTypes": "c6i.2xlarge",
            "cpuWorkerCount": "1",
            "checkQuotas": "false",
            "workerPools": json.dumps(
                {
                    "h100": {
                        "instanceTypes": ["p5.48xlarge"],
                        "zones": ["us-west-2a", "us-west-2b"],
                        "max": 2,
                        "efa": "auto",
                    },
                    "l4": {"instanceTypes": ["g6.xlarge"], "min": 1, "max": 3, "spot": True},
                    "prep": {"instanceTypes": ["c6i.8xlarge"], "max": 2, "rootVolumeGib": 500},
                }
            ),
        },
    },
    "existing network and image": {
        "config": {
            "vpcId": "vpc-0a1b",
            "subnetIds": "subnet-0c2d",
            "imageUri": READY_IMAGE,
            "registrySecretArn": f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:registry-a1b2c3",
            "dataBuckets": "my-data",
            "taskPolicyArns": ",".join(TASK_POLICIES),
            "kmsKeyArn": KEY,
            "mounts": "data=s3://my-data/faces",
            "fsxLustre": LUSTRE,
            "efs": EFS,
        },
        "prices": {},
    },
    "no GPU workers": {
        "config": {
            "workerCount": "0",
            "imageUri": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/ray:1",
            "headAmiId": "ami-0abc1234",
        },
        "amis": {"ami-0abc1234": {}},
    },
    "large workers": {
        "config": {
            "workerInstanceTypes": "g5.12xlarge",
            "workerEfa": "auto",
            "workerCount": "4",
            "checkQuotas": "false",
            "natGateway": "false",
            "instancePolicyArns": INSTANCE_POLICY,
            "imageBuild": "codebuild",
            "retainBucket": "true",
            "fsxLustreGib": "1200",
            "rotateToken": "2026-11",
            "redeployWorkers": "again",
        },
    },
    "more workers": {
        "config": {
            "workerInstanceTypes": "g6.2xlarge",
            "workerCount": "5",
            "maxWorkers": "6",
            "idleTimeoutMinutes": "60",
            "retainBucket": "true",
        },
        "runs": ("first",),
    },
    "NAT instance": {
        "config": {
            "natInstance": "true",
            "sleepAfterMinutes": "60",
            "kmsKeyArn": KEY,
            "instancePolicyArns": INSTANCE_POLICY,
            "permissionsBoundary": f"arn:aws:iam::{ACCOUNT}:policy/boundary",
            "rolePath": "/teams/ml/",
            "tags": "team=vision",
        },
    },
    "from zero": {
        "config": {"workerCount": "0", "maxWorkers": "4", "bucketName": "company-bucket"},
        "runs": ("first",),
    },
    **{
        f"up in zone a, configured for {letter}": {
            "config": {"availabilityZones": f"us-west-2{letter}"},
            "kept": {"zones": "us-west-2a"},
            "runs": ("first",),
        }
        for letter in "ab"
    },
}


def deploy(*, preview: bool = False, **of_cloud: Any) -> Cloud:
    """Run the program in a Cloud with these attributes."""
    cloud = Cloud(preview=preview, **of_cloud)
    exported: dict[str, pulumi.Output[Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pulumi, "export", lambda name, value: exported.update({name: pulumi.Output.from_input(value)}))
        patch.chdir(ROOT)
        cloud.run(lambda: runpy.run_path(str(ROOT / "__main__.py"), run_name="__main__") and None)
    cloud.exports = {name: cloud.value(output) for name, output in exported.items()}
    return cloud


@cache
def deployed(name: str) -> Cloud:
    """The account after an update of one of STACKS."""
    return deploy(**STACKS[name])


def takes_tags(resource_type: str) -> bool:
    """True if the SDK's class of a resource type has tags."""
    package, module, name = resource_type.split(":")
    library = __import__({"aws": "pulumi_aws", "awsx": "pulumi_awsx"}[package], fromlist=[""])
    return hasattr(getattr(getattr(library, module.split("/")[0]), name), "tags")
