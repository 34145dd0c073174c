"""Account, region, availability zones and endpoint services of a cluster."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pulumi
import pulumi_aws as aws

from infra.config.args import RayClusterArgs
from infra.config.lookups import REFUSE, WARN, Question, ask_all
from infra.definitions.addresses import ZONE_LETTERS
from infra.definitions.nat import INSTANCE_TYPE as NAT_TYPE
from infra.errors import Refusal, SettingError, error_reason, warn
from infra.types import Caller, ExistingNetwork, Location
from ray_on_ecs.contract import DEFAULT_POOL, SETTINGS, field_of

# Availability zones by instance type or endpoint service.
Offerings = dict[str, set[str]]
# https://www.pulumi.com/registry/packages/aws/installation-configuration/
ALLOWED = "aws:allowedAccountIds"
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
# Ways out for what a region or its zones do not offer.
INSTEAD = {"nat_gateway": "keep it at true", "nat_instance": "keep it at false, for a NAT gateway"}


def ask_caller(opts: pulumi.InvokeOptions | None = None) -> Caller:
    """Account, region and partition of the AWS provider: the first call, which fails without credentials."""
    try:
        caller = Caller(
            account=aws.get_caller_identity(opts=opts).account_id,
            region=aws.get_region(opts=opts).region,
            partition=aws.get_partition(opts=opts).partition,
        )
    except Exception as error:  # The SDK raises a bare Exception for every error of the provider.
        refused = re.search(r"account ID not allowed: (\d{12})", str(error), re.I)
        if refused:
            raise wrong_account(refused[1], " or ".join(_allowed_accounts()) or "another") from error
        hint = (
            "sign in, and set the region with `pulumi config set aws:region us-west-2`; enable an opt-in region with "
            "`aws account enable-region --region-name REGION`"
        )
        raise Refusal("aws:region", f"AWS could not be called ({error_reason(error)}); {hint}") from error
    if not caller.account:  # in a preview, Pulumi answers so for a provider with unknown configuration
        problem = "the AWS provider's configuration must be known while Pulumi plans, and depends on other resources"
        raise Refusal("provider", f"{problem}; use plain values")
    return caller


def check_account(account: str) -> None:
    """Refuse an account that is not in aws:allowedAccountIds; warn if that is not set."""
    allowed = _allowed_accounts()
    if not allowed:
        warn(
            f"{ALLOWED}: is not set; with another account's credentials `pulumi up` would create a second stack there "
            f"and lose track of this one. Set it: `pulumi config set --path '{ALLOWED}[0]' {account}`"
        )
    elif account not in allowed:
        raise wrong_account(account, " or ".join(allowed))


def wrong_account(account: str, expected: str) -> Refusal:
    """Error for credentials of another account than the stack's."""
    return Refusal(
        ALLOWED,
        f"the stack is in account {expected}, and these credentials are of {account}; choose others with AWS_PROFILE "
        "or `pulumi config set aws:profile NAME`",
    )


def _allowed_accounts() -> list[str]:
    """Account IDs of aws:allowedAccountIds; `pulumi config set --path` stores them as numbers."""
    text = pulumi.Config("aws").get("allowedAccountIds") or "[]"
    try:
        accounts = json.loads(text)
    except ValueError:
        accounts = None
    if not isinstance(accounts, list):
        raise Refusal(
            ALLOWED,
            f"{text} is not a list; `pulumi config rm {ALLOWED}`, then "
            f"`pulumi config set --path '{ALLOWED}[0]' {text}`",
        )
    return [str(account).zfill(12) for account in accounts]


def network_of_program(args: RayClusterArgs) -> ExistingNetwork | None:
    """Network that the same program creates, so EC2 does not know it yet; None if there is none."""
    subnets, zones = args.subnet_ids, args.availability_zones
    if not any(isinstance(part, pulumi.Output) for part in (args.vpc_id, *subnets)):
        return None
    if len(subnets) != len(zones):
        problem = f"has {len(zones)} zones for {len(subnets)} subnet_ids of a VPC that the same program creates"
        raise SettingError("availability_zones", ",".join(zones), problem, "use the zone of each, in the same order")
    return ExistingNetwork(vpc_id=args.vpc_id, subnets=dict(zip(zones, subnets, strict=True)))


def locate(
    args: RayClusterArgs, caller: Caller, existing: ExistingNetwork | None, opts: pulumi.InvokeOptions | None = None
) -> Location:
    """Find the availability zones in which the cluster can run."""
    zones = tuple(existing.subnets) if existing else _zones_of_region(caller.region, opts)
    worker_zones = tuple(args.availability_zones) or (zones if existing else ())
    endpoints, by_service = ({}, {}) if args.nat_gateway else _endpoints(args, caller, opts)
    by_type = _offerings(args, caller.region, zones, worker_zones, opts)
    suitable = _common_zones(args, caller.region, zones, by_type, by_service)
    _check_zones(args, caller.region, zones, worker_zones, suitable, by_type, by_service, existing)
    _check_zones_of_pools(args, caller.region, zones, by_type, existing)
    return Location(
        **vars(caller),
        zones=zones,
        worker_zones=worker_zones,
        suitable=suitable,
        candidates=() if existing else worker_zones[:1] or _best(args, suitable, by_type),
        nat_zones=tuple(zone for zone in zones if zone in by_type.get(NAT_TYPE, ())),
        existing=existing,
        endpoints=endpoints,
    )


def check_zone(args: RayClusterArgs, location: Location, zone: str) -> str:
    """Zone that the state keeps, if it still suits; SettingError otherwise."""
    if not location.worker_zones and zone not in location.suitable:
        problem = f"is empty, and the cluster's zone {zone} does not offer {_types(args)}"
        hint = f"use {' or '.join(location.suitable)}, and the cluster moves there{_or_zones(args)}"
        raise SettingError("availability_zones", "", problem, hint)
    if args.nat_instance and zone not in location.nat_zones:
        problem = f"needs a {NAT_TYPE} in {zone}, the zone of the first `pulumi up`, which does not offer it"
        raise SettingError("nat_instance", True, problem, INSTEAD["nat_instance"])
    return zone


def _zones_of_region(region: str, opts: pulumi.InvokeOptions | None) -> tuple[str, ...]:
    """Availability zones of the region, also impaired ones, whose subnets must stay.

    Local and Wavelength Zones (us-west-2-lax-1a) lack NAT gateways or GPU capacity.
    """
    filters = [aws.GetAvailabilityZonesFilterArgs(name="zone-type", values=["availability-zone"])]
    try:
        names = aws.get_availability_zones(filters=filters, opts=opts).names
    except Exception as error:
        raise Refusal(
            "availability_zones",
            f"the zones of {region} could not be read (ec2:DescribeAvailabilityZones: {error_reason(error)}); grant "
            "the caller that action, or use an existing network (vpc_id and subnet_ids)",
        ) from error
    return tuple(sorted(name for name in names if name[-1] in ZONE_LETTERS))


def _offerings(
    args: RayClusterArgs,
    region: str,
    zones: Sequence[str],
    preferred: Sequence[str],
    opts: pulumi.InvokeOptions | None,
) -> Offerings:
    """Zones by instance type; if EC2 denies the call, all types are taken to be in the preferred and pools' zones.

    That of a NAT instance, whose zone the state keeps, is taken to be in all zones.
    """
    types = {args.head_instance_type, *(name for pool in args.pools.values() for name in pool.instance_types)}
    types = sorted(types | ({NAT_TYPE} if args.nat_instance else set()))
    filters = [aws.ec2.GetInstanceTypeOfferingsFilterArgs(name="instance-type", values=types)]
    try:
        offered = aws.ec2.get_instance_type_offerings(location_type="availability-zone", filters=filters, opts=opts)
    except Exception as error:
        reason = f"ec2:DescribeInstanceTypeOfferings: {error_reason(error)}"
        problem = f"instance type offerings of {region} could not be read ({reason})"
        if not preferred:
            raise Refusal("availability_zones", f"{problem}; use a zone that offers the types") from error
        known = tuple(dict.fromkeys([*preferred, *(zone for pool in args.pools.values() for zone in pool.zones)]))
        warn(f"{problem}; continuing in {', '.join(known)}")
        return {name: {*(zones if name == NAT_TYPE else known)} for name in types}
    by_type: Offerings = {name: set() for name in types}
    for name, zone in zip(offered.instance_types, offered.locations, strict=True):
        by_type[name].add(zone)
    return by_type


def _endpoints(
    args: RayClusterArgs, caller: Caller, opts: pulumi.InvokeOptions | None
) -> tuple[dict[str, str], Offerings]:
    """Names and zones of the endpoint services that nodes call, by AWS service; no zones if EC2 does not tell.

    Runs on Spot Instances read spot prices from EC2, and workers in a Capacity Block its end; jobs read secrets from
    Secrets Manager, and instance policies allow the KMS key of Session Manager.
    """
    asks_ec2 = any(pool.most and (pool.spot or pool.capacity_reservation_id) for pool in args.pools.values())
    optional = {"ec2": asks_ec2, "secretsmanager": bool(args.job_secrets), "kms": bool(args.instance_policy_arns)}
    services = (*INTERFACE_ENDPOINTS, *(service for service, is_called in optional.items() if is_called))
    names = {service: f"com.amazonaws.{caller.region}.{service}" for service in services}
    zones: Offerings = {}
    denied, hint = WARN if caller.partition == "aws" else REFUSE, "keep nat_gateway at true"
    questions = []
    for name in names.values():
        # In China the prefix depends on the service.
        filters = [aws.ec2.GetVpcEndpointServiceFilterArgs(name="service-name", values=[name, f"cn.{name}"])]
        call = partial(aws.ec2.get_vpc_endpoint_service, service_type="Interface", filters=filters)
        questions.append(
            Question("nat_gateway", name, "ec2:DescribeVpcEndpointServices", call, [], hint, denied=denied)
        )
    for service, found in zip(services, ask_all(questions, opts), strict=True):
        if not found:  # nor will others be told
            break
        names[service], zones[f"a VPC endpoint of {service}"] = found.service_name, {*found.availability_zones}
    return names, zones


def _common_zones(
    args: RayClusterArgs, region: str, zones: Sequence[str], by_type: Offerings, by_service: Offerings
) -> tuple[str, ...]:
    """Zones with subnets that offer all endpoints, and a type of the head, each pool there and NAT; never none."""
    needs = [(key, ",".join(names), _offering(by_type, names)) for key, names in _types_by_field(args).items()]
    needs += [("nat_gateway", service, offered) for service, offered in by_service.items()]
    needs += [("nat_instance", NAT_TYPE, by_type[NAT_TYPE])] if args.nat_instance else []
    common, others = {*zones}, []
    for key, value, offered in needs:
        if not common & offered:
            problem = f"is not offered in any zone of {region}"
            hint = "check its spelling, and separate several by commas; or use another region"
            if offered:
                problem += f" together with {' and '.join(others)}" if others else ""
                hint = f"use another type or another region{_or_zones(args)}"
            raise SettingError(key, value, problem, INSTEAD.get(key, hint))
        common &= offered
        others.append(value)
    return tuple(sorted(common))


def _check_zones(
    args: RayClusterArgs,
    region: str,
    of_region: Sequence[str],
    zones: Sequence[str],
    suitable: Sequence[str],
    by_type: Offerings,
    by_service: Offerings,
    existing: ExistingNetwork | None,
) -> None:
    """Refuse a first zone without all types, and others, which are for workers alone, without theirs."""
    if existing and not existing.subnets.keys() >= {*args.availability_zones}:
        problem = f"must be zones of subnet_ids, {', '.join(existing.subnets)}"
        hint = "use some of these, add subnets in other zones to subnet_ids, or leave it empty for all"
        raise SettingError("availability_zones", ",".join(args.availability_zones), problem, hint)
    for_workers = {*zones}
    if args.pools[DEFAULT_POOL].most:
        for_workers &= _offering(by_type, args.worker_instance_types)
    for_workers = for_workers.intersection(*by_service.values())
    field = "subnet_ids" if existing and not args.availability_zones else "availability_zones"
    for number, zone in enumerate(zones):
        fit = for_workers if number else suitable
        if zone not in of_region:
            problem = f"is not an availability zone of {region}"
            raise SettingError(field, zone, problem, f"use {' or '.join(of_region)}, or set aws:region")
        if zone not in fit:
            types = " or ".join(args.worker_instance_types) if number else _types(args)
            subnet = existing.subnets[zone] if existing and field == "subnet_ids" else zone
            problem = f"does not offer {types}" if subnet == zone else f"is in {zone}, which does not offer {types}"
            hint = f"use {' or '.join(sorted(fit))}, or another type{'' if number else _or_zones(args)}"
            if field == "subnet_ids":
                hint += ", or name the zones of the others in availability_zones"
            raise SettingError(field, subnet if isinstance(subnet, str) else zone, problem, hint)


def _check_zones_of_pools(
    args: RayClusterArgs, region: str, zones: Sequence[str], by_type: Offerings, existing: ExistingNetwork | None
) -> None:
    """Refuse zones of a pool in `worker_pools` without a subnet or its types."""
    for name, pool in args.pools.items():
        if name in SETTINGS:
            continue
        offered = {*zones} & (_offering(by_type, pool.instance_types) if pool.most else {*zones})
        for zone in pool.zones:
            if zone in offered:
                continue
            field, others = field_of(name, "zones"), " or ".join(sorted(offered) or zones)
            if zone in zones:
                hint = f"use {' or '.join([*sorted(offered), 'another type'])}"
                raise SettingError(field, zone, f"does not offer {' or '.join(pool.instance_types)}", hint)
            if existing and re.fullmatch(f"{region}[a-z]", zone):
                hint = f"add a subnet in {zone} to subnet_ids, or use {others}"
                raise SettingError(field, zone, "has no subnet in subnet_ids", hint)
            raise SettingError(field, zone, f"is not an availability zone of {region}", f"use {others}")


def _offering(by_type: Offerings, types: Sequence[str]) -> set[str]:
    """Zones that offer one of the types."""
    return set[str]().union(*(by_type[name] for name in types))


def _best(args: RayClusterArgs, suitable: Sequence[str], by_type: Offerings) -> tuple[str, ...]:
    """Zones that offer most of the types: these are the capacity pools, for on-demand and spot alike."""
    variety = Counter(zone for names in _types_by_field(args).values() for name in names for zone in by_type[name])
    most = max(variety[zone] for zone in suitable)
    return tuple(zone for zone in suitable if variety[zone] == most)


def _types(args: RayClusterArgs) -> str:
    """Instance types that the head's zone offers, and endpoints, for messages."""
    types = sorted({" or ".join(names) for names in _types_by_field(args).values()})
    types += [f"{NAT_TYPE} for nat_instance"] if args.nat_instance else []
    return " and ".join(types if args.nat_gateway else [*types, "VPC endpoints"])


def _types_by_field(args: RayClusterArgs) -> dict[str, Sequence[str]]:
    """Instance types by field of what is in the head's zone: the head, and pools without other zones."""
    there = {
        field_of(name, "instance_types"): pool.instance_types
        for name, pool in args.pools.items()
        if pool.most and (name == DEFAULT_POOL or not pool.zones)
    }
    return {"head_instance_type": (args.head_instance_type,), **there}


def _or_zones(args: RayClusterArgs) -> str:
    """Way out for a type of a pool in `worker_pools` that the head's zone lacks."""
    are_there = any(name not in SETTINGS and pool.most and not pool.zones for name, pool in args.pools.items())
    return ", or set the pool's zones" if are_there else ""
