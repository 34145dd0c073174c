"""VPC with private subnets, a NAT gateway or VPC endpoints, and security groups; or an existing VPC."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws
import pulumi_awsx as awsx

from infra.definitions import policies
from infra.definitions.subnets import PUBLIC_PREFIX, private_prefix
from infra.tags import CLUSTER_TAG, ZONE_TAG, ZONES_TAG, stack_tags, tags
from infra.types import Location, NetworkRef
from ray_on_ecs.contract import DASHBOARD_PORT, NOTEBOOK_PORT

# Services that agents, containers and jobs call. S3 always has a gateway endpoint.
# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/vpc-endpoints.html
# https://docs.aws.amazon.com/AmazonECR/latest/userguide/vpc-endpoints.html
# https://docs.aws.amazon.com/systems-manager/latest/userguide/setup-create-vpc.html
INTERFACE_ENDPOINTS = (
    "ecs",
    "ecs-agent",
    "ecs-telemetry",
    "ecr.api",
    "ecr.dkr",
    "logs",
    "monitoring",
    "ssm",
    "ssmmessages",
    "autoscaling",
)
# EC2 accepts no endpoint policy for the ECS agent's services, and AWS does not document the condition keys of requests
# that carry a token of ECR or Session Manager.
# https://docs.aws.amazon.com/vpc/latest/privatelink/aws-services-privatelink-support.html
WITHOUT_POLICY = {"ecs-agent", "ecs-telemetry", "ecr.dkr", "ssmmessages"}
HTTPS_PORT = 443


@dataclass(frozen=True, kw_only=True)
class NetworkArgs:
    """Inputs of Network, mostly plain values, since awsx.ec2.Vpc takes no Outputs for them.

    With an existing network in `location`, no part of a VPC is created or changed.
    """

    vpc_cidr: str
    location: Location
    cluster_name: pulumi.Input[str]
    nat_gateway: bool = True
    spot: bool = False
    reads_secrets: bool = False
    instance_policies: bool = False


class Network(pulumi.ComponentResource):
    """VPC, NAT gateway and S3 endpoint, unless the VPC exists, and the security groups of tasks and instances.

    Instances and services depend on the whole component, not only on their subnet: they need the NAT gateway, its
    route and the security group rules to join the cluster and, on `destroy`, to report their tasks stopped.
    """

    vpc_id: pulumi.Output[str]
    ref: NetworkRef

    def __init__(self, name: str, args: NetworkArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Network", name, None, opts)
        existing = args.location.existing
        if existing:
            self.vpc_id = pulumi.Output.from_input(existing.vpc_id)
            subnets = dict(existing.subnets)
        else:
            vpc = self._vpc(name, args)
            self.vpc_id = vpc.vpc_id
            self._s3_endpoint(name, args, vpc)
            # A subnet in every zone is free, and lets instances and services fail over to another zone.
            subnets = {zone: vpc.private_subnet_ids[index] for index, zone in enumerate(args.location.zones)}
            self._close_default_group(name)
        tasks = self._tasks_group(name, args)
        instances = self._instances_group(name)
        # Session Manager forwards these ports from an instance to a task.
        for service, port in (("dashboard", DASHBOARD_PORT), ("notebook", NOTEBOOK_PORT)):
            self._admit(f"{name}-tasks-{service}", tasks, instances, port)
        if not args.nat_gateway:
            # Runs on Spot Instances read spot prices from EC2, jobs read secrets from Secrets Manager, and instance
            # policies allow the KMS key of Session Manager.
            optional = {"ec2": args.spot, "secretsmanager": args.reads_secrets, "kms": args.instance_policies}
            services = (*INTERFACE_ENDPOINTS, *(service for service, is_called in optional.items() if is_called))
            self._endpoints(name, services, args.location, subnets, self._endpoints_group(name, tasks, instances))
        self.ref = NetworkRef(subnets=subnets, tasks_group_id=tasks.id, instances_group_id=instances.id, network=self)
        self.register_outputs({"vpc_id": self.vpc_id, "subnet_id": subnets[args.location.zone]})

    def _vpc(self, name: str, args: NetworkArgs) -> awsx.ec2.Vpc:
        private = private_prefix(args.vpc_cidr, len(args.location.zones))
        # One NAT gateway per zone would cost more than the traffic between zones.
        strategy = awsx.ec2.NatGatewayStrategy.SINGLE if args.nat_gateway else awsx.ec2.NatGatewayStrategy.NONE
        return awsx.ec2.Vpc(
            f"{name}-vpc",
            cidr_block=args.vpc_cidr,
            availability_zone_names=list(args.location.zones),
            subnet_strategy=awsx.ec2.SubnetAllocationStrategy.AUTO,
            subnet_specs=[
                awsx.ec2.SubnetSpecArgs(type=awsx.ec2.SubnetType.PRIVATE, name="private", cidr_mask=private),
                awsx.ec2.SubnetSpecArgs(type=awsx.ec2.SubnetType.PUBLIC, name="public", cidr_mask=PUBLIC_PREFIX),
            ],
            nat_gateways=awsx.ec2.NatGatewayConfigurationArgs(strategy=strategy),
            # Private DNS namespaces require both attributes, and EC2 leaves host names off by default.
            # https://docs.aws.amazon.com/Route53/latest/DeveloperGuide/hosted-zone-private-considerations.html
            enable_dns_hostnames=True,
            enable_dns_support=True,
            # Without a Name tag, since awsx names each part of the VPC itself.
            tags=stack_tags(),
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _s3_endpoint(self, name: str, args: NetworkArgs, vpc: awsx.ec2.Vpc) -> None:
        """Gateway endpoint for checkpoints and image layers: it is free, while the NAT gateway charges by the byte.

        With internet access its policy is open, since a restriction would block only the public buckets of this region.
        The open policy is explicit, since the AWS provider does not remove a policy that the program drops. awsx could
        create the endpoint as well, but under the same name in every cluster of a program.
        """
        location = args.location
        policy = policies.open_endpoint()
        if not args.nat_gateway:
            policy = policies.s3_endpoint(
                partition=location.partition, region=location.region, account=location.account
            )
        aws.ec2.VpcEndpoint(
            f"{name}-s3",
            vpc_id=vpc.vpc_id,
            service_name=f"com.amazonaws.{location.region}.s3",
            vpc_endpoint_type="Gateway",
            route_table_ids=vpc.route_tables.apply(lambda tables: [table.id for table in tables]),
            policy=json.dumps(policy),
            tags=tags(f"{name}-s3"),
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _tasks_group(self, name: str, args: NetworkArgs) -> aws.ec2.SecurityGroup:
        """Security group that admits itself, since NCCL, Gloo and Ray's worker processes use random ports.

        Its tags hold cluster and zones for the next `pulumi up`, which would otherwise choose other zones.
        """
        location = args.location
        zones = {} if location.existing else {ZONES_TAG: " ".join(location.zones)}
        group = self._group(
            f"{name}-tasks",
            "Ray tasks: all traffic among themselves, and forwarded ports from instances",
            {CLUSTER_TAG: args.cluster_name, ZONE_TAG: location.zone, **zones},
        )
        self._admit(f"{name}-tasks-ingress", group, group)
        self._allow_egress(f"{name}-tasks", group)
        return group

    def _instances_group(self, name: str) -> aws.ec2.SecurityGroup:
        """Security group without ingress: the instances' agents call Session Manager and ECS, not the reverse.

        In awsvpc mode tasks have their own network interface and group, and can't reach services on the instances.
        """
        group = self._group(f"{name}-instances", "Ray instances: no inbound traffic")
        self._allow_egress(f"{name}-instances", group)
        return group

    def _endpoints_group(
        self, name: str, tasks: aws.ec2.SecurityGroup, instances: aws.ec2.SecurityGroup
    ) -> aws.ec2.SecurityGroup:
        group = self._group(f"{name}-endpoints", "VPC endpoints: HTTPS from Ray tasks and instances")
        for kind, source in (("tasks", tasks), ("instances", instances)):
            self._admit(f"{name}-endpoints-{kind}", group, source, HTTPS_PORT)
        return group

    def _group(
        self, name: str, description: str, more_tags: Mapping[str, pulumi.Input[str]] | None = None
    ) -> aws.ec2.SecurityGroup:
        # EC2 refuses apostrophes in the description of a group or a rule, which a preview does not detect.
        return aws.ec2.SecurityGroup(
            f"{name}-group",
            description=description,
            vpc_id=self.vpc_id,
            tags={**tags(f"{name}-group"), **(more_tags or {})},
            opts=pulumi.ResourceOptions(parent=self),
        )

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
            tags=tags(name),
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _allow_egress(self, name: str, group: aws.ec2.SecurityGroup) -> None:
        aws.vpc.SecurityGroupEgressRule(
            f"{name}-egress",
            description="AWS services and data sets",
            security_group_id=group.id,
            cidr_ipv4="0.0.0.0/0",
            ip_protocol="-1",
            tags=tags(f"{name}-egress"),
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _endpoints(
        self,
        name: str,
        services: Sequence[str],
        location: Location,
        subnets: Mapping[str, pulumi.Input[str]],
        group: aws.ec2.SecurityGroup,
    ) -> None:
        """Interface endpoints in the nodes' zones, for AWS services without internet access."""
        for service in services:
            aws.ec2.VpcEndpoint(
                f"{name}-{service.replace('.', '-')}",
                vpc_id=self.vpc_id,
                service_name=self._service_name(service, location),
                vpc_endpoint_type="Interface",
                subnet_ids=[subnets[zone] for zone in location.worker_zones],
                security_group_ids=[group.id],
                policy=None if service in WITHOUT_POLICY else json.dumps(policies.endpoint(location.account)),
                # The services' default DNS names then resolve to the endpoint.
                private_dns_enabled=True,
                tags=tags(f"{name}-{service.replace('.', '-')}"),
                opts=pulumi.ResourceOptions(parent=self),
            )

    def _service_name(self, service: str, location: Location) -> pulumi.Input[str]:
        """Endpoint service name; outside the partition `aws` its prefix depends on the service."""
        if location.partition == "aws":
            return f"com.amazonaws.{location.region}.{service}"
        names = [f"{prefix}.{location.region}.{service}" for prefix in ("com.amazonaws", "cn.com.amazonaws")]
        endpoint_service = aws.ec2.get_vpc_endpoint_service_output(
            service_type="Interface",
            filters=[aws.ec2.GetVpcEndpointServiceFilterArgs(name="service-name", values=names)],
            opts=pulumi.InvokeOutputOptions(parent=self),
        )
        return endpoint_service.service_name

    def _close_default_group(self, name: str) -> None:
        # Every VPC has a default security group that admits itself; managed without rules, it admits no traffic.
        # https://docs.aws.amazon.com/vpc/latest/userguide/default-security-group.html
        aws.ec2.DefaultSecurityGroup(
            f"{name}-default-group",
            vpc_id=self.vpc_id,
            tags=tags(f"{name}-default-group"),
            opts=pulumi.ResourceOptions(parent=self),
        )
