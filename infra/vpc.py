"""VPC with a private subnet in each availability zone, a NAT gateway or instance, and a gateway endpoint for S3."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import pulumi
import pulumi_aws as aws

from infra.definitions import policies
from infra.definitions.addresses import private_block, public_block
from infra.nat_instance import NatInstance, NatInstanceArgs
from infra.types import Location, ResourceRef, SecurityOptions, in_zone


@dataclass(frozen=True, kw_only=True)
class VpcArgs:
    """Inputs of Vpc.

    Attributes:
        location: All its zones have a subnet, which is free, and lets workers move to another zone.
        nat_zone: Zone of the NAT gateway or instance, which stays where it is when the head moves.
        nat_instance: True for a NAT instance in place of the gateway.
        sleeps: True if it is started and stopped with the head.
    """

    vpc_cidr: str
    location: Location
    nat_zone: pulumi.Input[str] = ""
    nat_gateway: bool = True
    nat_instance: bool = False
    sleeps: bool = False
    security: SecurityOptions = field(default_factory=SecurityOptions)


class Vpc(pulumi.ComponentResource):
    """VPC whose private subnets, by zone, share one route table."""

    vpc_id: pulumi.Output[str]
    subnets: Mapping[str, pulumi.Output[str]]
    nat_group: ResourceRef | None = None

    def __init__(self, name: str, args: VpcArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Vpc", name, None, opts)
        self._child = pulumi.ResourceOptions(parent=self)
        vpc = aws.ec2.Vpc(
            f"{name}-main",
            cidr_block=args.vpc_cidr,
            # Private DNS namespaces require both attributes, and EC2 leaves host names off by default.
            # https://docs.aws.amazon.com/Route53/latest/DeveloperGuide/hosted-zone-private-considerations.html
            enable_dns_hostnames=True,
            enable_dns_support=True,
            opts=self._child,
        )
        self.vpc_id = vpc.id
        private = self._route_table(f"{name}-private")
        self.subnets = {
            zone: self._subnet(f"{name}-private-{zone}", zone, private_block(args.vpc_cidr, zone), private)
            for zone in args.location.zones
        }
        if args.nat_gateway:
            self._lead_to_internet(name, args, private)
        self._s3_endpoint(name, args, private)
        # Every VPC has a default security group that admits itself; managed without rules, it admits no traffic.
        # https://docs.aws.amazon.com/vpc/latest/userguide/default-security-group.html
        aws.ec2.DefaultSecurityGroup(f"{name}-default-group", vpc_id=self.vpc_id, opts=self._child)
        self.register_outputs({"vpc_id": self.vpc_id})

    def _route_table(self, name: str) -> aws.ec2.RouteTable:
        return aws.ec2.RouteTable(f"{name}-routes", vpc_id=self.vpc_id, opts=self._child)

    def _subnet(self, name: str, zone: pulumi.Input[str], cidr: str, routes: aws.ec2.RouteTable) -> pulumi.Output[str]:
        subnet = aws.ec2.Subnet(
            f"{name}-subnet",
            vpc_id=self.vpc_id,
            cidr_block=cidr,
            availability_zone=zone,
            opts=self._child,
        )
        aws.ec2.RouteTableAssociation(
            f"{name}-association", subnet_id=subnet.id, route_table_id=routes.id, opts=self._child
        )
        return subnet.id

    def _lead_to_internet(self, name: str, args: VpcArgs, private: aws.ec2.RouteTable) -> None:
        """One NAT gateway or instance: one for each zone would cost more than the traffic between zones."""
        internet = aws.ec2.InternetGateway(f"{name}-internet", vpc_id=self.vpc_id, opts=self._child)
        public = self._route_table(f"{name}-public")
        subnet_id = self._subnet(f"{name}-public", args.nat_zone, public_block(args.vpc_cidr), public)
        out = aws.ec2.Route(
            f"{name}-public-route",
            route_table_id=public.id,
            destination_cidr_block="0.0.0.0/0",
            gateway_id=internet.id,
            opts=self._child,
        )
        opts = self._child
        if args.nat_instance:
            nat_args = NatInstanceArgs(
                vpc_id=self.vpc_id,
                cidr=args.vpc_cidr,
                location=args.location,
                zone=args.nat_zone,
                public_subnet_id=subnet_id,
                private_subnet_id=in_zone(self.subnets, args.nat_zone),
                internet=out,
                sleeps=args.sleeps,
                security=args.security,
            )
            nat = NatInstance(f"{name}-nat", nat_args, self._child)
            self.nat_group, target = nat.group, {"network_interface_id": nat.interface_id}
            # A change from the NAT gateway keeps it until the instance runs.
            opts = pulumi.ResourceOptions(parent=self, depends_on=[nat])
        else:
            # EC2 detaches an internet gateway only from a VPC without public addresses.
            after = pulumi.ResourceOptions(parent=self, depends_on=[out])
            address = aws.ec2.Eip(f"{name}-address", domain="vpc", opts=after)
            gateway = aws.ec2.NatGateway(f"{name}-nat", subnet_id=subnet_id, allocation_id=address.id, opts=after)
            target = {"nat_gateway_id": gateway.id}
        aws.ec2.Route(
            f"{name}-private-route",
            route_table_id=private.id,
            destination_cidr_block="0.0.0.0/0",
            **target,
            opts=opts,
        )

    def _s3_endpoint(self, name: str, args: VpcArgs, routes: aws.ec2.RouteTable) -> None:
        """Gateway endpoint for checkpoints and image layers: it is free, while the NAT gateway charges by the byte."""
        # With internet access a restriction would block only the public buckets of this region. The open policy is
        # explicit, since the AWS provider does not remove a policy that the program drops.
        policy = policies.open_endpoint() if args.nat_gateway else policies.s3_endpoint(args.location)
        aws.ec2.VpcEndpoint(
            f"{name}-s3",
            vpc_id=self.vpc_id,
            service_name=f"com.amazonaws.{args.location.region}.s3",
            vpc_endpoint_type="Gateway",
            route_table_ids=[routes.id],
            policy=json.dumps(policy),
            opts=self._child,
        )
