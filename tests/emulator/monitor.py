"""Pulumi's engine and providers for a program: they record its resources, and answer with references to them."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import json
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pulumi
from pulumi.runtime import mocks, rpc

from infra.image_build import ImageBuild
from tests.emulator import chance
from tests.emulator.schema import Block, argument, arguments, automatic_name, camel, properties, terraform_type
from tests.emulator.terraform import Refused, Terraform, is_reference, reference

ACCOUNT = "123456789012"
DIGEST = "sha256:" + "0" * 64
IMAGES = ("awsx:ecr:Image", "awsx:ecr:RegistryImage", "docker-build:index:Image")
# Functions whose answers don't change while a stack is emulated.
LASTING = ("getInstanceType", "getInstanceTypeOfferings", "getServiceQuota", "getDefaultTags")
# Envelope of a secret.
SECRET = ("4dabf18193072939515e22adb298388d", "1b47061264138c4ac30d75fd1eb44270")

Answer = tuple[dict[str, Any], list[tuple[str, str]]]


@dataclass
class Plan:
    """The program's resources, data sources and outputs in Terraform's form, and what Terraform has no word for.

    Attributes:
        names: The argument that Pulumi derives from the logical name, and that name, by address.
        replaced_on: Arguments whose change replaces the resource, by address.
        kept: What random resources have drawn.
        answers: Lasting answers of AWS.
        builds: Builds of images in CodeBuild, which run once the resources are up. The output `image_build_NUMBER` has
            what a build is called with.
    """

    resources: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    replaced_on: dict[str, list[str]] = field(default_factory=dict)
    deleted_first: set[str] = field(default_factory=set)
    deleted_with: set[str] = field(default_factory=set)
    retained: set[str] = field(default_factory=set)
    kept: chance.Kept = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)
    builds: list[ImageBuild] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Monitor(mocks.MockMonitor, mocks.Mocks):
    """Records one registration at a time; functions are answered by AWS."""

    def __init__(
        self, plan: Plan, schema: dict[str, Any], lookups: Terraform, state: str, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(self)
        self._plan, self._lookups, self._state, self._loop = plan, lookups, state, loop
        self._resources: dict[str, Any] = schema["resource_schemas"]
        self._sources: dict[str, Any] = schema["data_source_schemas"]
        self._lock = threading.Lock()
        self._transforms: dict[str, list[pulumi.ResourceTransform]] = {}
        self._urns: set[str] = set()
        self._addresses: dict[str, str] = {}
        self._request: Any = None  # the one that is being recorded

    def RegisterResource(self, request: Any) -> Any:
        urn = self.make_urn(request.parent, request.type, request.name)
        self._transform(urn, request)
        with self._lock:
            for each in (urn, *_children_of_awsx(urn, request)):
                if each in self._urns:
                    self._plan.problems.append(f"Duplicate resource URN '{each}'")
                self._urns.add(each)
            self._request = request
            return super().RegisterResource(request)

    def _transform(self, urn: str, request: Any) -> None:
        """Run the transforms of a resource and of all above it, as the engine does."""
        transforms = [*mocks._resolve_callbacks(request.transforms), *self._transforms.get(request.parent, [])]
        self._transforms[urn] = transforms
        for transform in transforms:
            props = rpc.deserialize_properties(request.object)
            args = pulumi.ResourceTransformArgs(
                request.custom, request.type, request.name, props, pulumi.ResourceOptions()
            )
            if isinstance(result := transform(args), pulumi.ResourceTransformResult):
                # Outputs among them belong to the program's loop; requests are answered in threads.
                changed = asyncio.run_coroutine_threadsafe(rpc.serialize_properties(result.props, {}), self._loop)
                request.object.CopyFrom(changed.result())

    def new_resource(self, args: mocks.MockResourceArgs) -> tuple[str, dict[str, Any]]:
        """Record a resource, and return its ID and its outputs."""
        inputs, name, problems = plain(args.inputs), args.name, self._plan.problems
        package = args.typ.split(":")[0]
        if package == "aws":
            if kind := terraform_type(args.typ, self._resources):
                return self._record(kind, args.typ, inputs)
            problems.append(f"{name}: the provider has nothing like {args.typ}")
        elif package == "random":
            ignored = self._request.ignoreChanges
            outputs = chance.keep(self._plan.kept, self._state, args.typ, name, inputs, ignored)
            return outputs["id"], outputs
        elif args.typ in IMAGES:
            uri = f"{inputs.get('repositoryUrl') or inputs['tags'][0]}@{DIGEST}"
            return name, {**inputs, "imageUri": uri, "ref": uri, "digest": DIGEST}
        elif args.custom and package != "pulumi":
            problems.append(f"{name}: {args.typ} is not emulated")
        return name, inputs

    def _record(self, kind: str, token: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        plan, request, block = self._plan, self._request, self._resources[kind]["block"]
        body = arguments(block, kind, inputs, plan.problems, request.name)
        key = re.sub(r"[^\w-]", "_", request.name, flags=re.ASCII)
        address = f"{kind}.{key}"
        if key in plan.resources.setdefault(kind, {}):
            plan.problems.append(f"{address}: another resource has this name")
        plan.resources[kind][key] = body
        before = {self._addresses[urn] for urn in request.dependencies if urn in self._addresses}
        if explicit := sorted(each for each in before if f"{each}." not in json.dumps(body)):
            body["depends_on"] = explicit
        ignored = _named(block, kind, request.ignoreChanges)
        if ignored:
            body["lifecycle"] = {"ignore_changes": ignored}
        if replaced_on := _named(block, kind, request.replaceOnChanges):
            plan.replaced_on[address] = replaced_on
        if kind == "aws_vpc_endpoint" and "subnet_ids" not in body and not body.get("route_table_ids"):
            plan.problems.append(f"{address}: a gateway endpoint without a route table, which nothing reaches")
        self._addresses[self.make_urn(request.parent, request.type, request.name)] = address
        self._note_end(address, automatic_name(kind, block), body)
        given = {name: value for name, value in inputs.items() if argument(block, kind, name) not in ignored}
        return reference(address, "id"), {**_references(token, kind, block, address), **given}

    def _note_end(self, address: str, name: str | None, body: dict[str, Any]) -> None:
        """Note how a resource is replaced and deleted."""
        plan, request = self._plan, self._request
        if name and not {name, f"{name}_prefix"} & body.keys():
            plan.names[address] = (name, request.name)
        elif name or request.deleteBeforeReplace:  # a name that the program gives can't be given twice
            plan.deleted_first.add(address)
        if request.deletedWith:
            plan.deleted_with.add(address)
        if request.retainOnDelete:
            plan.retained.add(address)

    def call(self, args: mocks.MockCallArgs) -> Answer:
        """Answer a function: by AWS now, or by references where an argument is not known yet."""
        function, region = args.token.rpartition(":")[2], self._lookups.region
        partition = {"us-gov": "aws-us-gov", "cn": "aws-cn"}.get(region.rsplit("-", 2)[0], "aws")
        match function:
            case "getRegion":
                return {"region": region, "name": region, "id": region}, []
            case "getPartition":
                suffix = "amazonaws.com.cn" if partition == "aws-cn" else "amazonaws.com"
                return {"partition": partition, "dnsSuffix": suffix, "id": partition}, []
            case "getCallerIdentity":
                return {"accountId": ACCOUNT, "arn": f"arn:{partition}:iam::{ACCOUNT}:root", "id": ACCOUNT}, []
        kind = terraform_type(args.token, self._sources)
        if kind is None:
            self._plan.problems.append(f"{args.token} is not emulated")
            return {}, [("", f"{args.token} is not emulated")]
        block = self._sources[kind]["block"]
        body = arguments(block, kind, plain(args.args), self._plan.problems, function)
        with self._lock:
            return self._later(kind, block, body) if is_reference(body) else self._now(function, kind, block, body)

    def _now(self, function: str, kind: str, block: Block, body: dict[str, Any]) -> Answer:
        question = f"{kind} {json.dumps(body, sort_keys=True)}"
        answer = self._plan.answers.get(question)
        if answer is None:
            try:
                answer = properties(block, self._lookups.read(kind, body))
            except Refused as refusal:
                return {}, [("", str(refusal))]
        if function in LASTING:
            self._plan.answers[question] = answer
        return answer, []

    def _later(self, kind: str, block: Block, body: dict[str, Any]) -> Answer:
        """References to a data source that is read after the resources in its arguments; lists have one item."""
        sources = self._plan.sources.setdefault(kind, {})
        key = f"source_{len(sources)}"
        sources[key] = {
            **body,
            "depends_on": [address for address in self._addresses.values() if f"{address}." in str(body)],
        }
        address, answer = f"data.{kind}.{key}", {}
        for name in block["attributes"].keys() - body.keys():
            match block["attributes"][name].get("type"):
                case ["list" | "set", str()]:
                    answer[name] = [reference(address, f"{name}[0]")]
                case ["map", _]:
                    answer[name] = {}
                case str():
                    answer[name] = reference(address, name)
        return properties(block, answer), []


def plain(value: Any) -> Any:
    """Value without the envelopes of secrets."""
    if isinstance(value, dict):
        if value.get(SECRET[0]) == SECRET[1]:
            return plain(value["value"])
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def _references(token: str, kind: str, block: Block, address: str) -> dict[str, str]:
    """The properties of the SDK's class behind a token, as references; a list's length is not known."""
    _, module, name = token.split(":")
    library = importlib.import_module(f"pulumi_aws.{module.split('/')[0]}".removesuffix(".index"))
    found = {}
    for attribute, _ in inspect.getmembers(getattr(library, name), lambda member: isinstance(member, property)):
        own = argument(block, kind, camel(attribute))
        if own and isinstance(block["attributes"].get(own, {}).get("type"), str):
            found[camel(attribute)] = reference(address, own)
    return found


def _named(block: Block, kind: str, paths: Iterable[str]) -> list[str]:
    """The provider's names of the arguments in which paths such as tags["Name"] begin."""
    first = [re.split(r"[.\[]", path)[0] for path in paths]
    return [argument(block, kind, each) or each for each in first]


def _children_of_awsx(urn: str, request: Any) -> list[str]:
    """URN of the child whose name awsx doesn't derive from the component's (awsx/ecr/image.ts)."""
    if request.type not in ("awsx:ecr:Image", "awsx:ecr:RegistryImage"):
        return []
    given = rpc.deserialize_properties(request.object)
    place = f"{given.get('context')};{given.get('dockerfile')}"
    built = given.get("imageName") or hashlib.sha1(place.encode()).hexdigest()
    return [f"{urn.rsplit('::', 1)[0]}$docker-build:index:Image::{built}-container"]
