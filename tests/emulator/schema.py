"""Names: those of Pulumi's AWS package, and those of the Terraform provider that it is generated from."""

from __future__ import annotations

import re
from typing import Any

# Resources, functions and arguments whose names in Pulumi don't follow from the provider's.
TYPES = {
    "aws:servicediscovery/privateDnsNamespace:PrivateDnsNamespace": "aws_service_discovery_private_dns_namespace",
    "aws:servicediscovery/service:Service": "aws_service_discovery_service",
}
ARGUMENTS = {
    ("aws_cloudwatch_metric_alarm", "name"): "alarm_name",
    ("aws_sns_topic_subscription", "topic"): "topic_arn",
}
# Lists of the provider that take only one value, and are that value in Pulumi.
SINGLE = {("aws_fsx_lustre_file_system", "subnet_ids")}
# The argument that Pulumi derives from the logical name where the program gives none, if it is not `name`.
NAMES = {"aws_cloudwatch_metric_alarm": "alarm_name", "aws_s3_bucket": "bucket"}

Block = dict[str, Any]


def snake(name: str) -> str:
    """A name in the provider's form."""
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()


def camel(name: str) -> str:
    """A name in Pulumi's form."""
    head, *rest = name.split("_")
    return head + "".join(word.title() for word in rest)


def terraform_type(token: str, known: dict[str, Any]) -> str | None:
    """The provider's resource, or data source of a function `getX`, behind a token such as aws:ec2/vpc:Vpc."""
    _, module, name = token.split(":")
    module, name = module.split("/")[0], snake(name.removeprefix("get"))
    guesses = [f"aws_{snake(module)}_{name}", f"aws_{module}_{name}", f"aws_{name}", f"aws_vpc_{name}"]
    return next((each for each in [TYPES.get(token), *guesses] if each in known), None)


def argument(block: Block, kind: str, name: str) -> str | None:
    """The provider's name of an argument; Pulumi has the plural for lists that the provider calls by the singular."""
    known = {**block.get("attributes", {}), **block.get("block_types", {})}
    plain = snake(name)
    singular = [plain.removesuffix(end) + instead for end, instead in (("ies", "y"), ("es", ""), ("s", ""))]
    guesses = [ARGUMENTS.get((kind, name)), plain, *singular, f"{plain}s", f"{plain}_set"]
    return next((guess for guess in guesses if guess in known), None)


def arguments(block: Block, kind: str, inputs: dict[str, Any], problems: list[str], where: str) -> dict[str, Any]:
    """The provider's arguments for inputs; each that it doesn't have is added to the problems."""
    converted = {}
    for key, value in inputs.items():
        if value is None or key.startswith("__"):
            continue
        name = argument(block, kind, key)
        if name is None:
            if key != "region":  # of each resource, since version 6
                problems.append(f"{where}.{key}: not an argument of the provider")
            continue
        place = f"{where}.{name}"
        inner = _inner(block, name)
        if inner is None:
            attribute = block["attributes"][name]
            if attribute.get("computed") and not attribute.get("optional"):
                problems.append(f"{place}: read-only")
            converted[name] = [value] if (kind, name) in SINGLE else value
        elif isinstance(value, list) or name in block.get("block_types", {}):
            items = value if isinstance(value, list) else [value]
            converted[name] = [arguments(inner, name, item, problems, place) for item in items]
        else:
            converted[name] = arguments(inner, name, value, problems, place)
    return converted


def _inner(block: Block, name: str) -> Block | None:
    """The block below a name, None for a plain value."""
    if name in block.get("block_types", {}):
        return block["block_types"][name]["block"]
    attribute = block["attributes"][name]
    match attribute.get("type"):
        case [_, ["object", fields]] | ["object", fields]:
            return {"attributes": {field: {"type": kind, "optional": True} for field, kind in fields.items()}}
    return attribute.get("nested_type")


def properties(block: Block, values: dict[str, Any]) -> dict[str, Any]:
    """Values of the provider as Pulumi returns them; a list has its singular and its plural name."""
    named = {}
    for name, value in values.items():
        inner = _inner(block, name)
        if inner is not None and value is not None:
            value = [properties(inner, each) for each in value] if isinstance(value, list) else properties(inner, value)
        named[camel(name)] = value
        if isinstance(value, list):
            named[_plural(camel(name))] = value
    return named


def _plural(name: str) -> str:
    if name.endswith("y"):
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith("s") else f"{name}s"


def automatic_name(kind: str, block: Block) -> str | None:
    """The argument that Pulumi fills with the logical name and a random end, if the program leaves it out."""
    name = NAMES.get(kind, "name")
    attribute = block["attributes"].get(name, {})
    return name if attribute.get("required") or attribute.get("optional") else None
