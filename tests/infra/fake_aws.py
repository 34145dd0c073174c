"""Fake AWS account: records registered resources and answers like the real providers.

The facts of instance types are EC2's own, as moto carries them.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import moto
import pulumi
from botocore.exceptions import ClientError, EndpointConnectionError
from pulumi.runtime import mocks, rpc

from infra.config import buckets, code_build, docker, file_systems, prices, reservations
from infra.definitions.sizing import InstanceType, TaskSize
from infra.errors import SettingError
from infra.types import NodeSpec, Price
from ray_on_ecs.contract import GPUS
from tests.infra.fake_file_systems import FakeFileSystems

PROJECT, STACK, REGION, ACCOUNT = "ray-on-ecs", "dev", "us-west-2", "123456789012"
# Logical name of the cluster in __main__.py.
CLUSTER = "ray-on-ecs"
REGISTRY = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com"
DIGEST = "sha256:" + "a" * 64
SECRET = "the-token-that-must-not-be-seen"
PUBLIC_AMI = "ami-0abc"
# The Amazon ECS GPU-optimized AMI, as EC2 describes it.
AMI = {
    "state": "available",
    "architecture": "x86_64",
    "platform": "",
    "platformDetails": "Linux/UNIX",
    "virtualizationType": "hvm",
    "enaSupport": True,
    "rootDeviceType": "ebs",
    "rootDeviceName": "/dev/xvda",
    "bootMode": "uefi-preferred",
    "tpmSupport": "",
    "name": "al2023-ami-ecs-gpu-hvm-2023.0.20260922-kernel-6.1-x86_64-ebs",
    "imageOwnerAlias": "amazon",
    "deprecationTime": "2099-01-01T00:00:00.000Z",
    "productCodes": [],
    "blockDeviceMappings": [
        {"deviceName": "/dev/xvda", "ebs": {"volume_size": "30", "encrypted": "false", "delete_on_termination": "true"}}
    ],
}

# Pulumi takes the thread's event loop, which Python makes by itself with a warning (3.12) or not at all (3.14). One for
# all runs, never closed: with it would end the threads in which Pulumi's mocks open loops that they don't close.
_LOOP = asyncio.new_event_loop()
asyncio.set_event_loop(_LOOP)  # also for Outputs that a test makes before a run


@dataclass(frozen=True)
class Registered:
    """Registered resource."""

    type: str
    name: str
    inputs: dict[str, Any]
    parent: str
    provider: str
    providers: dict[str, str]
    dependencies: frozenset[str]
    retain_on_delete: bool
    delete_timeout: str
    ignore_changes: tuple[str, ...]
    replace_on_changes: tuple[str, ...]
    before_update: tuple[str, ...]


@dataclass
class Cloud(mocks.Mocks):
    """AWS account with its offers, registered resources, and the stack's outputs and messages."""

    stack: str = STACK
    project: str = PROJECT
    account: str = ACCOUNT
    region: str = REGION
    default_tags: dict[str, str] = field(default_factory=dict)
    config: dict[str, str] = field(default_factory=dict)
    image_problem: SettingError | None = None
    codebuild: Any = field(default_factory=lambda: BuiltImage())
    secret_keys: tuple[str, ...] = ()
    preview: bool = False
    is_up: bool = False
    zones: tuple[str, ...] = ("us-west-2-lax-1a", "us-west-2c", "us-west-2a", "us-west-2b")
    not_offered: dict[str, tuple[str, ...]] = field(default_factory=dict)
    without_endpoint: dict[str, tuple[str, ...]] = field(default_factory=dict)
    running: tuple[str, ...] = ("i-0123456789abcdef0",)
    quotas: Mapping[str, float | None] = field(default_factory=dict)
    vpcs: int = 1
    addresses: int = 0
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    s3_answers: dict[str, Any] = field(default_factory=dict)
    reservations: tuple[dict[str, Any], ...] = ()
    amis: dict[str, dict[str, Any]] = field(default_factory=dict)
    partition: str = "aws"
    bucket_region: str = REGION
    security_groups: tuple[dict[str, str], ...] = ()
    kept: Mapping[str, str | None] = field(default_factory=dict)  # None for a keeper that the state lacks
    prices: dict[str, float] | None = field(
        default_factory=lambda: {"m5.large": 0.096, "g5.xlarge": 1.006, "t4g.nano": 0.0042}
    )
    disk_price: float | None = 40.96
    # Of a GB of disk and a month, a NAT gateway, and an interface endpoint in a zone; a key that is missing has none.
    other_prices: dict[str, float] = field(
        default_factory=lambda: {"Storage": 0.08, "NAT Gateway": 0.045, "VpcEndpoint": 0.01}
    )
    spot_prices: dict[str, float] | None = field(default_factory=lambda: {"g5.xlarge": 0.4})
    absent: tuple[str, ...] = ()
    subnet_zones: dict[str, str] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    silence: str = "AccessDenied: not authorized"
    runs: tuple[str, ...] = ()
    vpc: dict[str, Any] = field(default_factory=dict)
    subnet: dict[str, Any] = field(default_factory=dict)
    resources: dict[str, Registered] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    providers: set[str] = field(default_factory=set)
    exports: dict[str, Any] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def run(self, program: Callable[[], Any]) -> Any:
        """Run a program to its end and return its result; an exported value that stays unknown is missing."""
        asyncio.set_event_loop(_LOOP)
        config = {key if ":" in key else f"{self.project}:{key}": value for key, value in self.config.items()}
        config = {"aws:allowedAccountIds": json.dumps([ACCOUNT]), **config}
        pulumi.runtime.set_all_config(config, [f"{self.project}:{key}" for key in self.secret_keys])
        monitor = _Recorder(self)
        pulumi.runtime.settings.ROOT.set(None)  # root of an earlier program
        pulumi.runtime.set_mocks(self, project=self.project, stack=self.stack, preview=self.preview, monitor=monitor)
        results = []

        @pulumi.runtime.test
        def drained() -> None:
            results.append(program())

        environment = mock.patch.dict(os.environ, {"PULUMI_CONFIG": json.dumps(config)})  # as the engine does
        clients = mock.patch.object(prices, "client", return_value=self)
        ec2 = mock.patch.object(reservations, "client", return_value=self)
        s3 = mock.patch.object(buckets, "client", return_value=FakeS3(self.s3_answers))
        # Independent of this machine's Docker.
        no_docker = mock.patch.object(docker, "check", return_value=self.image_problem)
        builds = mock.patch.object(code_build, "_client", return_value=self.codebuild)
        with (
            environment,
            clients,
            ec2,
            s3,
            mock.patch.object(file_systems, "client", FakeFileSystems().client),
            no_docker,
            builds,
            mock.patch.object(pulumi.log, "info", self.messages.append),
        ):
            drained()
        return results[0]

    def get_products(self, ServiceCode: str, Filters: list[dict[str, str]]) -> dict[str, list[str]]:
        """Answer as the price list does; one that cannot be reached has no prices at all."""
        if self.prices is None:
            raise EndpointConnectionError(endpoint_url="https://api.pricing.us-east-1.amazonaws.com/")
        wanted = {item["Field"]: item["Value"] for item in Filters}
        if (family := wanted.get("productFamily")) in ("Storage", "NAT Gateway", "VpcEndpoint"):
            assert ServiceCode == ("AmazonVPC" if family == "VpcEndpoint" else "AmazonEC2")
            price, unit = self.other_prices.get(family), "GB-Mo" if family == "Storage" else "Hrs"
            return {"PriceList": [] if price is None else [on_demand(price, unit), on_demand(0.02, "GB")]}
        if "volumeApiName" in wanted:
            return {"PriceList": [] if self.disk_price is None else [on_demand(self.disk_price, "GiBps-mo")]}
        price = self.prices.get(wanted["instanceType"])
        return {"PriceList": [] if price is None else [on_demand(price)]}

    def describe_spot_price_history(self, **asked: Any) -> dict[str, Any]:
        """Answer as EC2 does, with a price in each zone."""
        if self.spot_prices is None:
            raise EndpointConnectionError(endpoint_url=f"https://ec2.{REGION}.amazonaws.com/")
        [zones] = [item["Values"] for item in asked["Filters"] if item["Name"] == "availability-zone"]
        return {
            "SpotPriceHistory": [
                {"InstanceType": name, "AvailabilityZone": zone, "SpotPrice": str(self.spot_prices[name])}
                for name in asked["InstanceTypes"]
                for zone in zones
                if name in self.spot_prices
            ]
        }

    def describe_capacity_reservations(self, CapacityReservationIds: list[str]) -> dict[str, Any]:
        """Answer as EC2 does."""
        operation = "describe_capacity_reservations"
        if operation in self.silent:
            raise ClientError({"Error": {"Code": self.silence}}, operation)
        named = [
            reservation
            for reservation in self.reservations
            if reservation["CapacityReservationId"] in CapacityReservationIds
        ]
        return {"CapacityReservations": named}

    def value(self, output: pulumi.Input[Any]) -> Any:
        """Value of an output, or None where it is unknown."""
        asyncio.set_event_loop(_LOOP)
        values = []

        @pulumi.runtime.test
        def drained() -> None:
            pulumi.Output.from_input(output).apply(values.append)

        drained()
        return values[0] if values else None

    def of_type(self, token: str) -> list[Registered]:
        """Resources of one type, such as aws:ecs/service:Service."""
        return [resource for resource in self.resources.values() if resource.type == token]

    def needs(self, name: str) -> set[str]:
        """Names of everything that is created before a resource, and destroyed after it."""
        names: set[str] = set()
        todo = [name]
        while todo:
            new = (self.resources[todo.pop()].dependencies & self.resources.keys()) - names  # without awsx's children
            names |= new
            todo.extend(new)
        return names

    def new_resource(self, args: mocks.MockResourceArgs) -> tuple[str, dict[str, Any]]:
        """Answer with the outputs of a created resource; a preview knows only its inputs, unless the stack is up."""
        is_unknown = self.preview and not self.is_up
        if args.typ.startswith("awsx:"):
            return f"{args.name}-id", {} if is_unknown else _AWSX_OUTPUTS[args.typ](args.inputs)
        if is_unknown:
            return "", args.inputs
        arn = f"arn:aws:service:{REGION}:{ACCOUNT}:{args.name}"
        outputs = {"name": args.name, "arn": arn, **args.inputs}
        # The state has the results of the first `up`.
        if args.typ == "random:index/randomId:RandomId":
            keepers = {**outputs["keepers"], **self.kept}
            outputs["keepers"] = {key: keepers[key] for key in keepers if key != "hex" and keepers[key] is not None}
            outputs["hex"] = self.kept.get("hex", f"{outputs['prefix'].partition('-ray-')[0]}-ray-dev-c0ffee")
        return f"{args.name}-id", {**outputs, **_OUTPUTS.get(args.typ, {})}

    def call(self, args: mocks.MockCallArgs) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        """Answer a question to AWS, with the changes of `answers`."""
        answer, failures = self._answer(args)
        return {**answer, **self.answers.get(args.token.rpartition(":")[2], {})}, failures

    def _answer(self, args: mocks.MockCallArgs) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        self.calls.append((args.token, args.args))
        self.providers.add(args.provider)
        asked = args.token.rpartition(":")[2]
        if asked in self.silent:
            return {}, [("", self.silence)]
        match asked:
            case _ if asked in self.absent:
                return {}, [("", f"NotFoundException: {asked[3:]} can't be found")]
            case "getVpcEndpointService":
                [one_of] = args.args["filters"]
                wanted = "cn." if self.partition == "aws-cn" else "com."
                name = next(item for item in one_of["values"] if item.startswith(wanted))
                return {"serviceName": name, "availabilityZones": self._endpoint_zones(name)}, []
            case "getRouteTable":
                routes = [
                    {"cidrBlock": "10.0.0.0/16", "gatewayId": "local"},
                    {"cidrBlock": "0.0.0.0/0", "gatewayId": "", "natGatewayId": "nat-1"},
                ]
                return {"routes": routes, "gatewayId": ""}, []
            case "getBucket":
                if self.bucket_region != self.region:
                    redirected = "api error MovedPermanently: Moved Permanently"
                    return {}, [("", f"operation error S3: HeadBucket, StatusCode: 301, {redirected}")]
                return {"bucket": args.args["bucket"], "bucketRegion": self.bucket_region}, []
            case "getObjects":
                return {"commonPrefixes": [f"runs/{name}/" for name in self.runs]}, []
            case "getImage":
                return {"imageDigest": DIGEST, "imageSizeInBytes": 8 * 2**30}, []
            case "getPolicy":
                return {"arn": args.args["arn"], "path": "/"}, []
            case "getSecret":
                return {"arn": args.args["arn"], "kmsKeyId": ""}, []
            case "getKey":
                key = {"enabled": True, "keySpec": "SYMMETRIC_DEFAULT", "keyState": "Enabled", "validTo": ""}
                return {**key, "keyUsage": "ENCRYPT_DECRYPT", "keyManager": "CUSTOMER", "arn": args.args["keyId"]}, []
            case "getRegion":
                return {"region": self.region}, []
            case "getDefaultTags":
                return {"tags": self.default_tags}, []
            case "getCallerIdentity":
                return {"accountId": self.account}, []
            case "getPartition":
                return {"partition": self.partition}, []
            case "getInstanceType":
                return self._instance_type(args.args["instanceType"])
            case "getInstanceTypeOfferings":
                return self._offerings(args.args["filters"][0]["values"]), []
            case "getServiceQuota":
                return {"value": self.quotas.get(args.args["quotaCode"], 64.0)}, []
            case "getVpc":
                vpc = {
                    "id": args.args["id"],
                    "cidrBlock": "10.0.0.0/16",
                    "cidrBlockAssociations": [{"cidrBlock": "10.0.0.0/16", "state": "associated"}],
                    "instanceTenancy": "default",
                    "mainRouteTableId": "rtb-main",
                    "state": "available",
                    "enableDnsSupport": True,
                    "enableDnsHostnames": True,
                    "dhcpOptionsId": "dopt-1",
                    "ownerId": ACCOUNT,
                    **self.vpc,
                }
                return (vpc, []) if vpc["id"] == "vpc-0a1b" else ({}, [("id", "no matching EC2 VPC found")])
            case "getVpcDhcpOptions":
                return {"domainNameServers": ["AmazonProvidedDNS"]}, []
            case "getVpcs":
                return {"ids": [f"vpc-{number}" for number in range(self.vpcs)]}, []
            case "getEips":
                return {"allocationIds": [f"eipalloc-{number}" for number in range(self.addresses)]}, []
            case "getAmi":
                [ami] = args.args["filters"][0]["values"]
                amis = {PUBLIC_AMI: {}, **self.amis}
                return ({**AMI, **amis[ami]}, []) if ami in amis else ({}, [("", "Your query returned no results")])
            case "getSubnet":
                zone = self.subnet_zones.get(args.args["id"], "us-west-2b")
                subnet = {"vpcId": "vpc-0a1b", "availabilityZone": zone, "mapPublicIpOnLaunch": False}
                space = {"cidrBlock": "10.0.0.0/20", "availableIpAddressCount": 4091, "ipv6Native": False}
                more = {"id": args.args["id"], "state": "available", "outpostArn": "", **space}
                return {**more, **subnet, **self.subnet}, []
            case "getSecurityGroups":
                wanted = {item["name"].removeprefix("tag:"): item["values"] for item in args.args.get("filters", ())}
                wanted |= {key: [value] for key, value in args.args.get("tags", {}).items()}
                fits = [all(tags.get(key) in values for key, values in wanted.items()) for tags in self.security_groups]
                return {"ids": [f"sg-{number}" for number, fit in enumerate(fits) if fit]}, []
            case "getRole":
                return {"path": "/aws-service-role/"}, []
            case "getParameter":
                return {"name": args.args["name"], "insecureValue": PUBLIC_AMI}, []
            case "getInstances":
                return {"ids": list(self.running)}, []
            case "getAvailabilityZones":
                return {"names": sorted(zone for zone in self.zones if re.fullmatch(f"{self.region}[a-z]", zone))}, []
        raise AssertionError(f"the program asked AWS for {args.token}, which is new to the tests")

    def _endpoint_zones(self, service: str) -> list[str]:
        return [zone for zone in self.zones if zone not in self.without_endpoint.get(service.rpartition(".")[2], ())]

    def _instance_type(self, name: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        if name not in instance_types():
            return {}, [("instanceType", f"InvalidInstanceType: {name} does not exist\nrequest id: 1")]
        facts = instance_types()[name]
        network = facts["NetworkInfo"]
        gpus = [
            {
                "count": gpu["Count"],
                "manufacturer": gpu["Manufacturer"],
                "name": gpu["Name"],
                "memorySize": gpu["MemoryInfo"]["SizeInMiB"],
            }
            for gpu in facts.get("GpuInfo", {}).get("Gpus", [])
        ]
        others = {
            key: [{"name": device["Name"]} for device in facts.get(info, {}).get(devices, [])]
            for key, info, devices in (
                ("neuronDevices", "NeuronInfo", "NeuronDevices"),
                ("inferenceAccelerators", "InferenceAcceleratorInfo", "Accelerators"),
                ("fpgas", "FpgaInfo", "Fpgas"),
                ("mediaAccelerators", "MediaAcceleratorInfo", "Accelerators"),
            )
        }
        return {
            **others,
            "instanceType": name,
            "defaultVcpus": facts["VCpuInfo"]["DefaultVCpus"],
            "memorySize": facts["MemoryInfo"]["SizeInMiB"],
            "supportedArchitectures": facts["ProcessorInfo"]["SupportedArchitectures"],
            "gpuses": gpus,
            "bootModes": facts["SupportedBootModes"],
            "nitroTpmSupport": facts["NitroTpmSupport"],
            "ebsPerformanceMaximumThroughput": facts["EbsInfo"]
            .get("EbsOptimizedInfo", {})
            .get("MaximumThroughputInMBps"),
            "instanceDisks": [
                {"count": disk["Count"], "size": disk["SizeInGB"], "type": disk["Type"]}
                for disk in facts.get("InstanceStorageInfo", {}).get("Disks", [])
            ],
            "supportedPlacementStrategies": facts["PlacementGroupInfo"]["SupportedStrategies"],
            "supportedUsagesClasses": facts["SupportedUsageClasses"],
            "efaMaximumInterfaces": network.get("EfaInfo", {}).get("MaximumEfaInterfaces"),
            "maximumNetworkCards": network["MaximumNetworkCards"],
            "networkCards": [
                {
                    "index": card["NetworkCardIndex"],
                    "maximumInterfaces": card["MaximumNetworkInterfaces"],
                    "baselineBandwidth": card["BaselineBandwidthInGbps"],
                }
                for card in network["NetworkCards"]
            ],
            "networkPerformance": network["NetworkPerformance"],
        }, []

    def _offerings(self, types: list[str]) -> dict[str, Any]:
        known = [name for name in types if name in instance_types()]
        pairs = [(name, zone) for zone in self.zones for name in known if zone not in self.not_offered.get(name, ())]
        return {"instanceTypes": [name for name, _ in pairs], "locations": [zone for _, zone in pairs]}


@dataclass
class FakeS3:
    """S3, as it answers about a bucket of this account without versions; an answer may be the code of an error."""

    answers: dict[str, Any]

    def __getattr__(self, call: str) -> Callable[..., Any]:
        return lambda **asked: self._answer(f"{call}_by_owner" if "ExpectedBucketOwner" in asked else call)

    def _answer(self, call: str) -> Any:
        nothing = {
            "get_bucket_lifecycle_configuration": "NoSuchLifecycleConfiguration",
            "get_object_lock_configuration": "ObjectLockConfigurationNotFoundError",
        }
        answer = {**nothing, **self.answers}.get(call, {})
        if isinstance(answer, str):
            raise ClientError({"Error": {"Code": answer}}, call)
        return answer


class BuiltImage:
    """ECR with the image of every build context, and CodeBuild with nothing to do."""

    def get_caller_identity(self) -> dict[str, str]:
        """Answer as STS does."""
        return {"Account": ACCOUNT}

    def describe_images(self, **asked: Any) -> dict[str, Any]:
        """Answer as ECR does."""
        return {"imageDetails": [{"imageDigest": DIGEST}]}

    def batch_get_projects(self, **asked: Any) -> dict[str, Any]:
        """Answer as CodeBuild does."""
        return {"projects": []}


class _Recorder(mocks.MockMonitor):
    """Keeps what mocks alone do not see: dependencies and the other resource options."""

    def __init__(self, cloud: Cloud) -> None:
        super().__init__(cloud)
        self._cloud = cloud
        self._transforms: dict[str, list[pulumi.ResourceTransform]] = {}

    def RegisterResource(self, request: Any) -> Any:
        self._transform(request)
        response = super().RegisterResource(request)
        if request.type == "pulumi:pulumi:Stack":
            return response
        name = self._short(request.name)
        assert name not in self._cloud.resources, f"duplicate resource name {name}"
        self._cloud.resources[name] = Registered(
            type=request.type,
            name=request.name,
            inputs=rpc.deserialize_properties(request.object),
            parent=self._name(request.parent),
            provider=request.provider,
            providers=dict(request.providers),
            dependencies=frozenset(map(self._name, request.dependencies)),
            retain_on_delete=request.retainOnDelete,
            delete_timeout=request.customTimeouts.delete,
            ignore_changes=tuple(request.ignoreChanges),
            replace_on_changes=tuple(request.replaceOnChanges),
            before_update=tuple(request.hooks.before_update),
        )
        return response

    def _transform(self, request: Any) -> None:
        """Run the transforms of a resource and of all above it, as the engine does."""
        transforms = [*mocks._resolve_callbacks(request.transforms), *self._transforms.get(request.parent, [])]
        self._transforms[self.make_urn(request.parent, request.type, request.name)] = transforms
        for transform in transforms:
            props = rpc.deserialize_properties(request.object)
            args = pulumi.ResourceTransformArgs(
                request.custom, request.type, request.name, props, pulumi.ResourceOptions()
            )
            result = transform(args)
            if isinstance(result, pulumi.ResourceTransformResult):
                # Outputs among them belong to the program's loop; requests are answered in threads.
                changed = asyncio.run_coroutine_threadsafe(rpc.serialize_properties(result.props, {}), _LOOP)
                request.object.CopyFrom(changed.result())
                request.retainOnDelete |= bool(result.opts.retain_on_delete)

    def _name(self, urn: str) -> str:
        return self._short(urn.rpartition("::")[2])

    def _short(self, name: str) -> str:
        """Name of a resource without the prefix that all of the stack's share."""
        return name.removeprefix(f"{CLUSTER}-")


def later(value: Any) -> pulumi.Output[Any]:
    """A value as another resource hands it on."""
    return pulumi.Output.from_input(value)


def group_tags(prefix: str = CLUSTER, *, stack: str = STACK, project: str = PROJECT) -> dict[str, str]:
    """Tags of the security group of a cluster that is up."""
    name = f"{stack}-{prefix}-network-tasks-group"
    return {"Name": name, "ray-on-ecs:project": project, "ray-on-ecs:stack": stack}


def instance_type(name: str, vcpus: int = 4, gpus: int = 0) -> InstanceType:
    """Instance type with valid defaults."""
    gpu = GPUS.get(name.partition(".")[0], "GPU") if gpus else ""
    return InstanceType(name=name, vcpus=vcpus, memory_mib=16384, architectures=("x86_64",), gpus=gpus, gpu_name=gpu)


def node_spec(
    name: str = "g5.xlarge",
    count: int = 2,
    *,
    key: str = "workerInstanceTypes",
    vcpus: int = 4,
    gpus: int = 0,
    usd: float | None = None,
    zones: tuple[str, ...] = ("us-west-2b",),
    **more: Any,
) -> NodeSpec:
    """Node specification with a number of instances of a type."""
    return NodeSpec(
        key=key,
        instances=(instance_type(name, vcpus, gpus),),
        task=TaskSize(vcpus=vcpus, memory_mib=14336, gpus=gpus),
        max_count=count,
        prices=None if usd is None else {name: Price(on_demand=usd)},
        zones=zones,
        **more,
    )


def on_demand(price: float, unit: str = "Hrs") -> str:
    """Product of the price list with a price of a unit."""
    dimension = {"unit": unit, "pricePerUnit": {"USD": f"{price:.10f}"}}
    return json.dumps(
        {"terms": {"OnDemand": {"SKU.JRTCKXETXF": {"priceDimensions": {"SKU.JRTCKXETXF.6YS6": dimension}}}}}
    )


@cache
def instance_types() -> dict[str, Any]:
    """EC2's whole catalogue of instance types."""
    path = Path(moto.__file__).parent / "ec2/resources/instance_types.json.gz"
    return json.loads(gzip.decompress(path.read_bytes()))


_AWSX_OUTPUTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "awsx:ec2:Vpc": lambda inputs: {
        "vpcId": "vpc-1",
        "privateSubnetIds": [f"subnet-private-{zone}" for zone in inputs["availabilityZoneNames"]],
    },
    "awsx:ecr:Image": lambda inputs: {"imageUri": f"{REGISTRY}/training@{DIGEST}"},
}
ECS_CLUSTER = f"arn:aws:ecs:{REGION}:{ACCOUNT}:cluster/ray-on-ecs-ray-dev-c0ffee"
_OUTPUTS: dict[str, dict[str, Any]] = {
    "aws:ecs/cluster:Cluster": {"arn": ECS_CLUSTER},
    "aws:ec2/networkInterface:NetworkInterface": {"macAddress": "02:00:00:00:00:02", "privateIp": "10.0.64.10"},
    "aws:s3/bucket:Bucket": {"bucket": "training-bucket", "arn": "arn:aws:s3:::training-bucket"},
    "aws:ecr/repository:Repository": {"repositoryUrl": f"{REGISTRY}/training"},
    "random:index/randomPassword:RandomPassword": {"result": SECRET},
}
