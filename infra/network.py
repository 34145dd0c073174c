"""VPC with private subnets, a NAT gateway, NAT instance or VPC endpoints, and security groups; or an existing VPC."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.definitions import policies
from infra.types import Location, NetworkRef, ResourceRef
from infra.vpc import Vpc, VpcArgs
from ray_on_ecs.contract import DASHBOARD_PORT, NOTEBOOK_PORT

# EC2 accepts no endpoint policy for the ECS agent's services, and AWS does not document the condition keys of requests
# that carry a token of ECR or Session Manager.
# https://docs.aws.amazon.com/vpc/latest/privatelink/aws-services-privatelink-support.html
WITHOUT_POLICY = {"ecs-agent", "ecs-telemetry", "ecr.dkr", "ssmmessages"}
HTTPS_PORT = 443


@dataclass(frozen=True, kw_only=True)
class NetworkArgs(VpcArgs):
    """Inputs of Network; with an existing network in `location`, no part of a VPC is created or changed.

    `zone` is the availability zone of the head, and `efa` is true if a type has EFA.
    """

    zone: pulumi.Input[str]
    efa: bool = False


class Network(pulumi.ComponentResource):
    """VPC, unless it exists, VPC endpoints without a NAT gateway, and the security groups of tasks and instances.

    Instances and services depend on the whole component, not only on their subnet: they need the NAT gateway or
    instance, its route and the security group rules to join the cluster and, on `destroy`, to report their tasks
    stopped.
    """

    vpc_id: pulumi.Output[str]
    ref: NetworkRef
    nat_group: ResourceRef | None = None

    def __init__(self, name: str, args: NetworkArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Network", name, None, opts)
        existing = args.location.existing
        if existing:
            self.vpc_id = pulumi.Output.from_input(existing.vpc_id)
            subnets = dict(existing.subnets)
        else:
            vpc = Vpc(f"{name}-vpc", args, pulumi.ResourceOptions(parent=self))
            self.vpc_id, subnets, self.nat_group = vpc.vpc_id, dict(vpc.subnets), vpc.nat_group
        # It admits itself, since NCCL, Gloo and Ray's worker processes use random ports.
        tasks = self._group(
            f"{name}-tasks", "Ray tasks: all traffic among themselves, and forwarded ports from instances", egress=True
        )
        self._admit(f"{name}-tasks-ingress", tasks, tasks)
        # Their agents call Session Manager and ECS, not the reverse. In awsvpc mode tasks have their own network
        # interface and group, and can't reach services on the instances.
        instances = self._group(f"{name}-instances", "Ray instances: no inbound traffic", egress=True)
        # Session Manager forwards these ports from an instance to a task.
        for service, port in (("dashboard", DASHBOARD_PORT), ("notebook", NOTEBOOK_PORT)):
            self._admit(f"{name}-tasks-{service}", tasks, instances, port)
        self.ref = NetworkRef(
            zone=args.zone,
            subnets=subnets,
            tasks_group_id=tasks.id,
            instances_group_id=instances.id,
            network=self,
            efa_group_id=self._efa_group(f"{name}-efa") if args.efa else "",
        )
        if args.location.endpoints:
            endpoints = self._group(f"{name}-endpoints", "VPC endpoints: HTTPS from Ray tasks and instances")
            for kind, source in (("tasks", tasks), ("instances", instances)):
                self._admit(f"{name}-endpoints-{kind}", endpoints, source, HTTPS_PORT)
            self._endpoints(name, args.location, endpoints)
        self.register_outputs({"vpc_id": self.vpc_id})

    def _group(self, name: str, description: str, *, egress: bool = False) -> aws.ec2.SecurityGroup:
        # EC2 refuses apostrophes in the description of a group or a rule, which a preview does not detect.
        group = aws.ec2.SecurityGroup(
            f"{name}-group", description=description, vpc_id=self.vpc_id, opts=pulumi.ResourceOptions(parent=self)
        )
        if egress:
            aws.vpc.SecurityGroupEgressRule(
                f"{name}-egress",
                description="AWS services and data sets",
                security_group_id=group.id,
                cidr_ipv4="0.0.0.0/0",
                ip_protocol="-1",
                opts=pulumi.ResourceOptions(parent=self),
            )
        return group

    def _efa_group(self, name: str) -> pulumi.Output[str]:
        """Group of the instances' EFA interfaces; an outbound rule for all addresses does not admit EFA's traffic.

        https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html#efa-start-security
        """
        group = self._group(name, "Ray EFA: all traffic among its interfaces")
        self._admit(f"{name}-ingress", group, group)
        aws.vpc.SecurityGroupEgressRule(
            f"{name}-egress",
            security_group_id=group.id,
            referenced_security_group_id=group.id,
            ip_protocol="-1",
            opts=pulumi.ResourceOptions(parent=self),
        )
        return group.id

    def _admit(
        self, name: str, group: aws.ec2.SecurityGroup, source: aws.ec2.SecurityGroup, port: int | None = None
    ) -> None:
        """Admit traffic from members of `source`, on one TCP port or all."""
        aws.vpc.SecurityGroupIngressRule(
            name,
            security_group_id=group.id,
            referenced_security_group_id=source.id,
            ip_protocol="tcp" if port else "-1",
            from_port=port,
            to_port=port,
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _endpoints(self, name: str, location: Location, group: aws.ec2.SecurityGroup) -> None:
        """Interface endpoints for AWS services without internet access.

        They are in the zones of the default pool, and their DNS names lead other pools' nodes there from any zone.
        """
        for service, service_name in location.endpoints.items():
            aws.ec2.VpcEndpoint(
                f"{name}-{service.replace('.', '-')}",
                vpc_id=self.vpc_id,
                service_name=service_name,
                vpc_endpoint_type="Interface",
                subnet_ids=self.ref.subnets_in(location.worker_zones),
                security_group_ids=[group.id],
                policy=None if service in WITHOUT_POLICY else json.dumps(policies.endpoint(location.account)),
                # The services' default DNS names then resolve to the endpoint.
                private_dns_enabled=True,
                opts=pulumi.ResourceOptions(parent=self),
            )
