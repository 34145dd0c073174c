"""Rules for AWS's answers: all fields that can make an existing resource unfit for this stack.

tests/infra/test_lookups.py has an unfit example of each rule, and lists the fields that are harmless.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pulumi

from infra.config.rules import DOCKER_BRIDGE
from infra.definitions.sizing import ARCHITECTURE, InstanceType
from infra.definitions.user_data import ROOT_DEVICE

GIB = 2**30
# Names of the VPC's Route 53 Resolver in DHCP options; only it resolves private hosted zones.
# https://docs.aws.amazon.com/vpc/latest/userguide/AmazonDNS-concepts.html
VPC_RESOLVERS = {"AmazonProvidedDNS", "169.254.169.253"}
CUSTOM_DNS = "uses custom DNS servers ({})"
EMPTY = ("",)
PRIVATE = "use a private subnet, whose route table leads to a NAT gateway or to VPC endpoints"


class Rule(NamedTuple):
    """Condition on an answer of AWS.

    Attributes:
        fields: Names of the fields that it reads, the first of which fills `{}` in the problem.
        fits: Fit values of the first field, or a predicate of all fields.
        problem: Continues "setting: 'value' …".
        hint: Way out; by default that of the question.
        is_warning: True if the stack may work nevertheless.
    """

    fields: str
    fits: Collection[Any] | Callable[..., bool]
    problem: str
    hint: str = ""
    is_warning: bool = False

    def problem_of(self, answer: Any) -> str:
        """The problem of an unfit answer, or an empty string, also for a field that AWS leaves out."""
        values = [getattr(answer, field) for field in self.fields.split()]
        if values[0] is None:
            return ""
        is_fit = self.fits(*values) if callable(self.fits) else values[0] in self.fits
        return "" if is_fit else self.problem.format(", ".join(values[0]) if _is_list(values[0]) else values[0])


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


def warning(fields: str, fits: Collection[Any] | Callable[..., bool], problem: str, hint: str = "") -> Rule:
    """Rule for a resource that may work nevertheless."""
    return Rule(fields, fits, problem, hint, is_warning=True)


def arn(partition: str, region: str, account: str, *, shared: bool) -> list[Rule]:
    """Rules for an ARN; `shared` resources of other accounts can be used if their own policies allow it."""
    foreign = "belongs to account {}" + (", and works only if its policy admits the stack's roles" if shared else "")
    return [
        Rule("partition", (partition,), "is in the partition {}", f"use one of {partition}"),
        Rule("region", ("", region), f"is in {{}}, but the stack is in {region}", f"use one in {region}"),
        Rule("account", (account, "aws"), foreign, "use one of this account", is_warning=shared),
    ]


# https://docs.aws.amazon.com/IAM/latest/UserGuide/access_policies_managed-vs-inline.html
POLICY = [Rule("path", lambda path: not path.startswith("/aws-service-role/"), "is only for service-linked roles")]


KEY = [
    Rule("key_spec", ("SYMMETRIC_DEFAULT",), "is of type {}", "use a symmetric key"),
    Rule("key_usage", ("ENCRYPT_DECRYPT",), "is for {}", "use a key for encryption"),
    Rule("key_state enabled", lambda state, _: state == "Enabled", "is {}", "enable it, or use another"),
    # Its policy admits only one service, and no grants.
    Rule("key_manager", ("CUSTOMER",), "is managed by {}", "use your own key, or leave it empty for AWS keys"),
    warning("valid_to", EMPTY, "has imported material that expires at {}, and all data with it", "import it again"),
]


def encryption(field: str, key_arn: pulumi.Input[str], hint: str, *, is_warning: bool) -> list[Rule]:
    """The stack's roles may use the stack's key, unless it is an Output that could be any, and AWS's keys."""
    if not isinstance(key_arn, str):
        return []
    names = ("", key_arn.rpartition("/")[2])
    problem = "is encrypted with the KMS key {}, which the stack's roles can't use"
    # An alias that could not be looked up may be of the stack's key.
    return [Rule(field, lambda key: "alias/" in key or key.rpartition("/")[2] in names, problem, hint, is_warning)]


def bucket(region: str, *, is_warning: bool) -> list[Rule]:
    """Rule for a bucket's region; data can come from another one, but not through the endpoint for S3."""
    hint = f"use one in {region}, " + ("or expect charges for the transfer" if is_warning else "which the nodes reach")
    return [Rule("bucket_region", (region,), f"is in {{}}, but the stack is in {region}", hint, is_warning)]


# Facts of infra/config/buckets.py about the stack's own bucket.
BUCKET = [
    warning("is_own", (True,), "belongs to another account, which can read it", "use one of this account"),
    warning(
        "versions_expire",
        (True,),
        "keeps noncurrent versions for ever, so that deleted checkpoints stay billed",
        "add a lifecycle rule with NoncurrentVersionExpiration",
    ),
    warning("retention", EMPTY, "locks objects for {}, so that deleted checkpoints stay billed", "use another"),
    warning("expiration", EMPTY, "has a lifecycle rule that deletes the runs {}", "exclude runs/ from that rule"),
    warning(
        "archive",
        EMPTY,
        "has a lifecycle rule that moves the runs to {}, from where training can't read them",
        "exclude runs/ from that rule",
    ),
]
DATA_BUCKET = [
    warning(
        "payer",
        ("BucketOwner",),
        "makes its requester pay, and refuses requests without that header",
        "copy it once: `aws s3 cp --request-payer requester`",
    )
]


def ecr_image(disk_field: str, disk_gib: int) -> list[Rule]:
    """The disk holds an image's compressed layers beside the unpacked ones, some three times as much together."""
    problem = f"has {{}} bytes compressed, too many for a disk of {disk_gib} GiB"
    return [warning("image_size_in_bytes", lambda size: size * 3 < disk_gib * GIB, problem, f"raise {disk_field}")]


def public_ami(disk_field: str, disk_gib: int) -> list[Rule]:
    """Rules for any machine image, also for the latest of AWS's, which the instances fit."""

    def has_room(disks: Sequence[Any], root: str) -> bool:
        return all(int(disk.ebs.get("volume_size") or 0) <= disk_gib for disk in disks if disk.device_name == root)

    return [
        Rule("architecture", (ARCHITECTURE,), "is for {}"),
        Rule("root_device_name", (ROOT_DEVICE,), f"has the root device {{}} instead of {ROOT_DEVICE}"),
        Rule(
            "block_device_mappings root_device_name",
            has_room,
            f"has a root volume of more than {disk_field} ({disk_gib})",
            f"raise {disk_field}",
        ),
    ]


def ami(instances: Sequence[InstanceType], disk_field: str, disk_gib: int, *, gpus: bool) -> list[Rule]:
    """Rules for a machine image of these instance types; Amazon's images are known by their names.

    https://docs.aws.amazon.com/AmazonECS/latest/developerguide/ecs-optimized_AMI.html
    """
    words = ("-ecs-", "gpu") if gpus else ("-ecs-",)
    wanted = "Amazon Linux for ECS" + (" with GPUs" if gpus else "")
    parts = "the ECS agent" + (" and the NVIDIA driver (580 or later)" if gpus else "")

    def is_for_ecs(name: str, owner: str) -> bool:
        return owner != "amazon" or (all(word in name for word in words) and "bottlerocket" not in name)

    def boots(mode: str) -> bool:
        return mode in (*EMPTY, "uefi-preferred") or all(
            not instance.boot_modes or mode in instance.boot_modes for instance in instances
        )

    def are_deleted(disks: Sequence[Any], *_: Any) -> bool:
        others = [disk.ebs for disk in disks if disk.device_name != ROOT_DEVICE]
        return not any(ebs.get("delete_on_termination") == "false" for ebs in others)

    def are_open(disks: Sequence[Any]) -> bool:
        return not any(disk.ebs.get("encrypted") == "true" for disk in disks)

    def is_current(name: str, owner: str, until: str) -> bool:
        is_over = "" < (until or "") < datetime.now(UTC).isoformat()
        return not is_over and not (owner == "amazon" and name.startswith("amzn2-"))

    return [
        *public_ami(disk_field, disk_gib),
        Rule("state", ("available",), "is {}"),
        Rule("platform", EMPTY, "is for {}"),
        Rule("virtualization_type", ("hvm",), "is for {} virtualization"),
        Rule("root_device_type", ("ebs",), "has a root device of type {}"),
        Rule("boot_mode", boots, "boots by {}, which not all of the instance types support"),
        Rule("tpm_support", lambda tpm: not tpm or all(item.tpm for item in instances), "requires a TPM"),
        Rule("name image_owner_alias", is_for_ecs, f"is Amazon's {{}}, which is not {wanted}"),
        warning("ena_support", (True,), "has no ENA driver, and so no network on current instances"),
        warning("image_owner_alias", ("amazon",), f"is not Amazon's; without {parts} its instances never join"),
        warning("name image_owner_alias deprecation_time", is_current, "({}) is deprecated, or too old for CUDA 13"),
        warning("platform_details", ("Linux/UNIX",), "adds the licence of {} to the price"),
        warning("product_codes", ([],), "starts only in an account that subscribed to it on AWS Marketplace"),
        warning("block_device_mappings root_device_name state", are_deleted, "has a disk that outlives its instance"),
        warning(
            "block_device_mappings",
            are_open,
            "is encrypted, and starts only if Auto Scaling's service-linked role may use its key",
            "grant that role the key, unless it is aws/ebs",
        ),
    ]


MOUNTPOINT = warning(
    "creation_date",
    # https://docs.aws.amazon.com/AmazonS3/latest/userguide/mountpoint-installation.html
    lambda date: date >= "2025-11-10",
    "is of {}, older than mount-s3 in Amazon Linux's repository (2023.9.20251110), which mounts need",
    "use a newer one, or install mount-s3 in it",
)


def vpc(account: str, region: str, vpc_id: str) -> list[Rule]:
    """Rules for an existing VPC, whose private DNS namespace needs its owner and both DNS attributes.

    https://docs.aws.amazon.com/Route53/latest/DeveloperGuide/hosted-zone-private-considerations.html
    """
    turn_on = f"turn it on (aws ec2 modify-vpc-attribute --region {region} --vpc-id {vpc_id} --enable-dns-{{}})"

    def is_apart(first: str, others: Sequence[Any]) -> bool:
        blocks = [first, *(other.cidr_block for other in others)]
        return not any(ipaddress.ip_network(block).overlaps(DOCKER_BRIDGE) for block in blocks)

    return [
        Rule("state", ("available",), "is {}"),
        Rule("owner_id", (account,), "is shared by account {}, and only the owner can associate a DNS namespace"),
        Rule("enable_dns_support", (True,), "has no DNS, by which workers find the head", turn_on.format("support")),
        Rule("enable_dns_hostnames", (True,), "has no DNS host names, as the head's", turn_on.format("hostnames")),
        warning("instance_tenancy", ("default",), "has {} tenancy, which costs more than the estimate"),
        warning(
            "cidr_block cidr_block_associations",
            is_apart,
            f"({{}}) overlaps Docker's bridge {DOCKER_BRIDGE} on every instance, which can't reach these addresses",
        ),
    ]


def dhcp_options(cidr_block: str) -> list[Rule]:
    """Rule for DNS servers: the VPC's resolver has names, and the third address of the VPC's first block."""
    resolvers = {*VPC_RESOLVERS, str(ipaddress.ip_network(cidr_block)[2])}
    hint = "let these forward queries for *.internal to the VPC's resolver, or workers do not find the head"
    return [
        warning("domain_name_servers", lambda servers: not servers or bool(resolvers & {*servers}), CUSTOM_DNS, hint)
    ]


def subnet(vpc_id: str, nodes_in: Callable[[str], int]) -> list[Rule]:
    """Rules for a subnet; in awsvpc mode a node takes an address for its instance and one for its task."""

    def has_room(cidr: str, zone: str) -> bool:
        return ipaddress.ip_network(cidr).num_addresses - 5 >= 2 * nodes_in(zone)

    return [
        Rule("vpc_id", (vpc_id,), "is part of {}"),
        Rule("state", ("available",), "is {}"),
        Rule("outpost_arn", EMPTY, "is on an Outpost"),
        Rule("ipv6_native", (False,), "has no IPv4 addresses"),
        warning("map_public_ip_on_launch", (False,), "is public, and the instances have no public addresses", PRIVATE),
        warning("cidr_block availability_zone", has_room, "({}) has too few addresses for the nodes in its zone"),
        warning("available_ip_address_count", lambda free: free >= 2, "has {} free addresses, and a node takes two"),
    ]


def _default(routes: Sequence[Any]) -> list[str]:
    return [route.gateway_id or "" for route in routes if route.cidr_block == "0.0.0.0/0"]


ROUTES = [
    warning(
        "routes",
        lambda routes: bool(_default(routes)),
        "has no default route (0.0.0.0/0)",
        "create endpoints for the services that instances call, or they never join (docs/accounts.md)",
    ),
    warning(
        "routes gateway_id",
        lambda routes, _: not any(gateway.startswith("igw-") for gateway in _default(routes)),
        "leads to an internet gateway, and the instances have no public addresses",
        PRIVATE,
    ),
]


def instance_type(usages: Collection[str], *, grouped: bool) -> list[Rule]:
    """Rules for an instance type that is bought in these ways; `grouped` GPUs share a placement group."""
    problem = f"is sold as {{}}, and requested as {' and '.join(usages)}"

    def is_fit(strategies: Sequence[str], gpus: Sequence[Any]) -> bool:
        return not grouped or not gpus or "cluster" in strategies

    return [
        Rule("supported_usages_classes", set(usages).issubset, problem),
        Rule("supported_placement_strategies gpuses", is_fit, "can't be in a cluster placement group"),
    ]


def lustre(vpc_id: str, zones: Collection[str]) -> list[Rule]:
    """Rules for a file system of FSx in the VPC of the nodes; traffic between zones is charged."""
    traffic = f"is in {{}}, and the nodes in {' or '.join(sorted(zones))}: traffic between zones is charged"
    hint = "set availability_zones, or the zones of the pools, to that zone, or use another"
    return [
        Rule("kind", ("LUSTRE",), "is of type {}", "use one of FSx for Lustre"),
        Rule("lifecycle", ("AVAILABLE", "UPDATING"), "is {}", "wait for it, or use another"),
        *_in_vpc(vpc_id),
        Rule("group_ids", bool, "has no network interface with a security group", "use another"),
        warning("zones", set(zones).issubset, traffic, hint),
    ]


# Role by which FSx reads and writes the bucket of a new file system.
# https://docs.aws.amazon.com/fsx/latest/LustreGuide/s3-server-side-encryption-support.html
LINK_ROLE, STATEMENT = "AWSServiceRoleForFSxS3Access_fs-*", "add the statement of docs/mounts.md to it"
LINKED_BUCKET = [
    warning(
        "kms_key",
        lambda key: not key or "alias/aws/" in key,
        f"is encrypted with the KMS key {{}}, which FSx can read and write only if its policy admits {LINK_ROLE}",
        STATEMENT,
    ),
]


def own_lustre(gib: int) -> list[Rule]:
    """Rule for the stack's file system, which a smaller one would replace, with what is not exported yet."""
    hint = "keep that, or export all (docs/mounts.md), set 0 for one `pulumi up`, and then the smaller one"
    return [Rule("capacity", lambda capacity: capacity <= gib, "is less than the {} of the stack's file system", hint)]


def efs(vpc_id: str, zones: Collection[str]) -> list[Rule]:
    """Rules for a file system of EFS, which a node reaches through the mount target in its zone.

    https://docs.aws.amazon.com/efs/latest/ug/mounting-fs-mount-helper-ec2-linux.html
    """
    needed = " and ".join(sorted(zones))
    return [
        Rule("lifecycle", ("available", "updating"), "is {}", "wait for it, or use another"),
        Rule(
            "one_zone",
            lambda zone: set(zones) <= {zone},
            "is One Zone storage in {}",
            f"let availability_zones and pools have only that zone instead of {needed}, or use another",
        ),
        Rule("group_ids", bool, "has no mount target", f"create one in each zone of the nodes ({needed})"),
        *_in_vpc(vpc_id),
        Rule("zones", set(zones).issubset, "has available mount targets only in {}", f"create one in {needed}, too"),
    ]


def _in_vpc(vpc_id: str) -> list[Rule]:
    """Rule for the VPC, unless the same program creates it."""
    return [Rule("vpc_id", (vpc_id,), "is in {}", f"use one in {vpc_id}")] if vpc_id else []
