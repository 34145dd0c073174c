"""RayCluster for other languages, with the arguments of infra/ in the types that Pulumi's analyzer takes."""

import ast
import inspect
from collections.abc import Mapping
from itertools import pairwise
from types import GenericAlias
from typing import Any, TypedDict, get_args

import pulumi

from infra.config import RayClusterArgs
from infra.config.fields import Text
from infra.config.worker_pool import WorkerPoolArgs
from infra.ray_cluster import RayCluster as Cluster
from ray_on_ecs.contract import key_of


def _declared(annotation: Any) -> Any:
    """Type of an argument: the analyzer knows neither rules in annotations nor sequences and mappings."""
    base = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    match get_args(base):
        case _ if base == Text:
            return Text
        case [element]:
            return GenericAlias(list, (_declared(element),))
        case [_, element] if WorkerPoolArgs in get_args(element):
            return dict[str, WorkerPool]
        case [key, element]:
            return GenericAlias(dict, (_declared(key), _declared(element)))
    return base


def _fields(class_: type) -> dict[str, Any]:
    return {name: _declared(annotation) for name, annotation in class_.__annotations__.items()}


WorkerPool = TypedDict("WorkerPool", _fields(WorkerPoolArgs), total=False)  # ty: ignore
WorkerPool.__doc__ = "Pool of equal workers, which runs choose by its name or its GPU."
Args = TypedDict("Args", _fields(RayClusterArgs), total=False)  # ty: ignore


class RayCluster(Cluster):
    """Ray on Amazon ECS for distributed PyTorch: network, bucket, image, head, GPU and CPU workers, monitoring."""

    def __init__(self, name: str, args: Args, opts: pulumi.ResourceOptions | None = None) -> None:
        given: dict[str, Any] = {argument: value for argument, value in args.items() if value is not None}
        super().__init__(name, RayClusterArgs.in_camel_case(**given), opts)


def describe(schema: Mapping[str, Any]) -> None:
    """Add the docstrings of arguments and outputs to the package's schema: the analyzer finds only those of a class."""
    cluster = schema["resources"]["ray-on-ecs:index:RayCluster"]
    pool = schema["types"]["ray-on-ecs:index:WorkerPool"]
    described = {RayClusterArgs: cluster["inputProperties"], WorkerPoolArgs: pool["properties"]}
    for class_, properties in {**described, Cluster: cluster["properties"]}.items():
        for name, text in docstrings(class_).items():
            part = properties[key_of(name)]
            while part:
                part["description"] = text
                part = part.get("items") or part.get("additionalProperties")


def docstrings(class_: type) -> dict[str, str]:
    """Docstrings of a class's annotated fields."""
    by_field = {}
    # ast.walk visits the statements of a class in source order, so a field is followed by its docstring.
    for field, docstring in pairwise(ast.walk(ast.parse(inspect.getsource(class_)))):
        match field, docstring:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                by_field[name] = text
    return by_field
