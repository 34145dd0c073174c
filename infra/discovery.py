"""Where the workers find the head: a DNS name in the VPC that follows the head's task."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.tags import tags

# A worker gives up on a lost head after a minute and starts again: by then the name has to lead to the new one.
TTL_SECONDS = 10
# https://datatracker.ietf.org/doc/html/rfc1035#section-2.3.4
LONGEST_LABEL = 63
HASH_LENGTH = 8


@dataclass(frozen=True, kw_only=True)
class DiscoveryArgs:
    """Inputs of Discovery."""

    vpc_id: pulumi.Input[str]


class Discovery(pulumi.ComponentResource):
    """A private DNS namespace and the head's record in it, which ECS fills in."""

    registry_arn: pulumi.Output[str]
    head_host: pulumi.Output[str]

    def __init__(self, name: str, args: DiscoveryArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Discovery", name, None, opts)
        namespace = aws.servicediscovery.PrivateDnsNamespace(
            f"{name}-namespace",
            name=namespace_name(pulumi.get_project(), pulumi.get_stack()),
            vpc=args.vpc_id,
            tags=tags(f"{name}-namespace"),
            opts=pulumi.ResourceOptions(parent=self),
        )
        service = self._head(name, namespace)
        self.registry_arn = service.arn
        self.head_host = pulumi.Output.concat(service.name, ".", namespace.name)
        self.register_outputs({"registry_arn": self.registry_arn, "head_host": self.head_host})

    def _head(self, name: str, namespace: aws.servicediscovery.PrivateDnsNamespace) -> aws.servicediscovery.Service:
        record = aws.servicediscovery.ServiceDnsConfigDnsRecordArgs(type="A", ttl=TTL_SECONDS)
        return aws.servicediscovery.Service(
            f"{name}-head",
            name="head",
            dns_config=aws.servicediscovery.ServiceDnsConfigArgs(
                namespace_id=namespace.id, dns_records=[record], routing_policy="MULTIVALUE"
            ),
            # ECS takes a stopped task's address out late; without this a leftover one fails the deletion.
            force_destroy=True,
            tags=tags(f"{name}-head"),
            opts=pulumi.ResourceOptions(parent=self),
        )


def namespace_name(project: str, stack: str) -> str:
    """Name of the stack's namespace.

    A stack's name may hold characters that a host name may not, and be longer than a part of one: then it is cut, and a
    hash keeps it apart from its likes.
    """
    name = f"{project}-{stack}"
    labels = re.sub(r"[^a-z0-9.-]", "-", name.lower()).split(".")
    if any(not 0 < len(label) <= LONGEST_LABEL for label in labels):
        digest = hashlib.sha256(name.encode()).hexdigest()[:HASH_LENGTH]
        labels = [f"{'-'.join(labels)[: LONGEST_LABEL - HASH_LENGTH - 1].rstrip('-')}-{digest}"]
    return ".".join([*labels, "internal"])
