"""Where everything runs: a VPC of the stack's own, with one way out and no way in, or a subnet that exists."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws
import pulumi_awsx as awsx

from infra.definitions import policies
from infra.definitions.subnets import PUBLIC_PREFIX, private_prefix
from infra.references import Location, NetworkRef
from infra.tags import CLUSTER_TAG, ZONE_TAG, ZONES_TAG, stack_tags, tags
from ray_on_ecs.contract import DASHBOARD_PORT, NOTEBOOK_PORT

# The services that agents, containers and jobs call; S3 has a gateway endpoint in any case.
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
# Of these, EC2 takes no policy for the endpoints of ECS's agent, and AWS doesn't say which conditions hold for requests
# that carry a token of ECR or Session Manager.
# https://docs.aws.amazon.com/vpc/latest/privatelink/aws-services-privatelink-support.html
WITHOUT_POLICY = {"ecs-agent", "ecs-telemetry", "ecr.dkr", "ssmmessages"}
HTTPS_PORT = 443


@dataclass(frozen=True, kw_only=True)
class NetworkArgs:
    """Inputs of Network; mostly plain values, as awsx.ec2.Vpc takes no outputs for them.

    Where the location is an existing network, nothing of a VPC is made, and nothing of that one is changed.
    """

    vpc_cidr: str
    location: Location
    cluster_name: pulumi.Input[str]
    nat_gateway: bool = True
    spot: bool = False
    reads_secrets: bool = False
    instance_policies: bool = False


class Network(pulumi.ComponentResource):
    """VPC, NAT gateway and S3 endpoint, if there is none yet, and the security groups of tasks and instances.

    Whatever runs in it depends on the whole component, not only on its subnet: instances need the NAT gateway, its
    route and the rules to join the cluster when they start and to report their tasks stopped when they go.
    """

    vpc_id: pulumi.Output[str]
    ref: NetworkRef

    def __init__(self, name: str, args: NetworkArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Network", name, None, opts)
        if existing := args.location.existing:
            self.vpc_id = pulumi.Output.from_input(existing.vpc_id)
            subnets = dict(existing.subnets)
        else:
            vpc = self._vpc(name, args)
            self.vpc_id = vpc.vpc_id
            self._s3_endpoint(name, args, vpc)
            # A subnet in every zone costs nothing, and lets instances and services move to another one.
            subnets = {zone: vpc.private_subnet_ids[index] for index, zone in enumerate(args.location.zones)}
            self._close_default_group(name)
        tasks = self._tasks_group(name, args)
        instances = self._instances_group(name)
        # Session Manager forwards these two from an instance to a task.
        for service, port in (("dashboard", DASHBOARD_PORT), ("notebook", NOTEBOOK_PORT)):
            self._admit(f"{name}-tasks-{service}", tasks, instances, port)
        if not args.nat_gateway:
            # A run on spot instances asks EC2 for their prices, jobs may read secrets of Secrets Manager, and policies
            # of instances are for Session Manager's key.
            more = {"ec2": args.spot, "secretsmanager": args.reads_secrets, "kms": args.instance_policies}
            services = (*INTERFACE_ENDPOINTS, *(service for service, is_called in more.items() if is_called))
            self._endpoints(name, services, args.location, subnets, self._endpoints_group(name, tasks, instances))
        self.ref = NetworkRef(subnets=subnets, tasks_group_id=tasks.id, instances_group_id=instances.id, network=self)
        self.register_outputs({"vpc_id": self.vpc_id, "subnet_id": subnets[args.location.zone]})

    def _vpc(self, name: str, args: NetworkArgs) -> awsx.ec2.Vpc:
        return awsx.ec2.Vpc(
            f"{name}-vpc",
            cidr_block=args.vpc_cidr,
            availability_zone_names=list(args.location.zones),
            subnet_strategy=awsx.ec2.SubnetAllocationStrategy.AUTO,
            subnet_specs=_subnets(args.vpc_cidr, len(args.location.zones)),
            nat_gateways=awsx.ec2.NatGatewayConfigurationArgs(
                strategy=awsx.ec2.NatGatewayStrategy.SINGLE if args.nat_gateway else awsx.ec2.NatGatewayStrategy.NONE
            ),
            # A private DNS namespace answers only where both are on, and AWS leaves host names off.
            enable_dns_hostnames=True,
            enable_dns_support=True,
            # No Name here: awsx names each part of the VPC itself.
            tags=stack_tags(),
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _s3_endpoint(self, name: str, args: NetworkArgs, vpc: awsx.ec2.Vpc) -> None:
        """Make a gateway endpoint for checkpoints and image layers: it is free, the NAT gateway charges by the byte.

        With a way to the internet it is open: a policy would keep jobs from public buckets of this region alone. An
        open policy is given, as the AWS provider leaves one in place that the program drops.
        awsx would make the endpoint, too, but under the same name in every cluster of a program.
        """
        place = args.location
        closed = policies.s3_endpoint(partition=place.partition, region=place.region, account=place.account)
        tables = vpc.route_tables.apply(lambda found: [table.id for table in found])
        aws.ec2.VpcEndpoint(
            f"{name}-s3",
            vpc_id=vpc.vpc_id,
            service_name=f"com.amazonaws.{place.region}.s3",
            vpc_endpoint_type="Gateway",
            route_table_ids=tables,
            policy=json.dumps(policies.open_endpoint() if args.nat_gateway else closed),
            tags=tags(f"{name}-s3"),
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _tasks_group(self, name: str, args: NetworkArgs) -> aws.ec2.SecurityGroup:
        """One group that trusts itself: NCCL, Gloo and Ray's workers pick ports of their own.

        Its tags say which cluster this is and where, which the next `up` asks for: a zone chosen anew would move it.
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
        """A group that admits nothing: Session Manager and ECS are called by the instances' agents.

        A task has a network interface of its own, and so a group of its own; it can't reach what listens on instances.
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
        # EC2 refuses an apostrophe in the description of a group or a rule, which no preview sees.
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
        """Admit members of `source`, through one TCP port or everything."""
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
        """What nodes call of AWS without a way to the internet: an address for each service in each of their zones."""
        for service in services:
            aws.ec2.VpcEndpoint(
                f"{name}-{service.replace('.', '-')}",
                vpc_id=self.vpc_id,
                service_name=self._service_name(service, location),
                vpc_endpoint_type="Interface",
                subnet_ids=[subnets[zone] for zone in location.worker_zones],
                security_group_ids=[group.id],
                policy=None if service in WITHOUT_POLICY else json.dumps(policies.endpoint(location.account)),
                # The services' usual names then lead here.
                private_dns_enabled=True,
                tags=tags(f"{name}-{service.replace('.', '-')}"),
                opts=pulumi.ResourceOptions(parent=self),
            )

    def _service_name(self, service: str, location: Location) -> pulumi.Input[str]:
        """Name of a service's endpoint; in other partitions than `aws` the names differ from service to service."""
        if location.partition == "aws":
            return f"com.amazonaws.{location.region}.{service}"
        names = [f"{prefix}.{location.region}.{service}" for prefix in ("com.amazonaws", "cn.com.amazonaws")]
        found = aws.ec2.get_vpc_endpoint_service_output(
            service_type="Interface",
            filters=[aws.ec2.GetVpcEndpointServiceFilterArgs(name="service-name", values=names)],
            opts=pulumi.InvokeOutputOptions(parent=self),
        )
        return found.service_name

    def _close_default_group(self, name: str) -> None:
        """AWS gives each VPC a group that trusts itself, for what names none; without rules it admits nothing."""
        aws.ec2.DefaultSecurityGroup(
            f"{name}-default-group",
            vpc_id=self.vpc_id,
            tags=tags(f"{name}-default-group"),
            opts=pulumi.ResourceOptions(parent=self),
        )


def _subnets(vpc_cidr: str, zones: int) -> list[awsx.ec2.SubnetSpecArgs]:
    """Two subnets of each zone, and one NAT gateway: one each would cost more than the traffic between zones does."""
    private = private_prefix(vpc_cidr, zones)
    return [
        awsx.ec2.SubnetSpecArgs(type=awsx.ec2.SubnetType.PRIVATE, name="private", cidr_mask=private),
        awsx.ec2.SubnetSpecArgs(type=awsx.ec2.SubnetType.PUBLIC, name="public", cidr_mask=PUBLIC_PREFIX),
    ]
