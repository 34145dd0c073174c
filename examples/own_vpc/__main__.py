"""A Ray cluster in a VPC that this program makes, beside whatever else runs there.

pulumi install && cd examples/own_vpc && pulumi stack init dev && pulumi config set aws:region us-west-2 && pulumi up
"""

import sys
from pathlib import Path

import pulumi
import pulumi_aws as aws
import pulumi_awsx as awsx

sys.path.append(str(Path(__file__).parents[2]))  # where infra/ is

from infra.config import RayClusterArgs
from infra.ray_cluster import RayCluster

# Known while Pulumi plans: AWS is asked whether these zones offer the instance types.
region = aws.get_region().region
found = aws.get_availability_zones(
    state="available", filters=[aws.GetAvailabilityZonesFilterArgs(name="zone-type", values=["availability-zone"])]
)
zones = list(found.names[:2])

vpc = awsx.ec2.Vpc(
    "company",
    cidr_block="10.1.0.0/16",
    availability_zone_names=zones,
    subnet_strategy=awsx.ec2.SubnetAllocationStrategy.AUTO,
    nat_gateways=awsx.ec2.NatGatewayConfigurationArgs(strategy=awsx.ec2.NatGatewayStrategy.SINGLE),
    # Checkpoints and image layers pass the gateway endpoint free of charge. AUTO attaches it to the route tables of the
    # private subnets; without it no route leads to the endpoint, and the NAT gateway charges for every gigabyte.
    vpc_endpoint_strategy=awsx.ec2.VpcEndpointStrategy.AUTO,
    vpc_endpoint_specs=[
        awsx.ec2.VpcEndpointSpecArgs(
            service_name=f"com.amazonaws.{region}.s3", vpc_endpoint_type="Gateway", tags={"Name": "company-s3"}
        )
    ],
    # The workers find the head by a private name.
    enable_dns_hostnames=True,
)
cluster = RayCluster(
    "vision",
    RayClusterArgs(
        vpc_id=vpc.vpc_id,
        subnet_ids=[vpc.private_subnet_ids[index] for index, _ in enumerate(zones)],
        availability_zones=zones,
        worker_instance_types=["g5.xlarge", "g6.xlarge"],
        max_workers=4,
        spot=True,
        tags={"team": "vision"},
    ),
    # What runs in the VPC starts after all of it, and goes before any of it.
    pulumi.ResourceOptions(depends_on=[vpc]),
)

pulumi.export("bucket", cluster.bucket)
pulumi.export("head_instance_id", cluster.head_instance_id)
pulumi.export("train_command", cluster.train_command)
pulumi.export("connection", cluster.connection)  # ray-on-ecs finds the cluster by it
