"""Generator of Pulumi.yaml's keys, docs/configuration.md and component/ray_cluster.py from RayClusterArgs.

`python -m component.generate --write` writes them.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import yaml

from infra.config.args import RayClusterArgs, defaults
from infra.config.fields import Text
from infra.config.worker_pool import Pools, WorkerPoolArgs, pool_defaults
from infra.ray_cluster import RayCluster
from ray_on_ecs.contract import key_of

ROOT = Path(__file__).parents[1]
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", tuple: "list", dict: "pairs", Pools: "object"}
# String form of the types that Pulumi.yaml does not have.
FORMS = {tuple: " (comma-separated)", dict: " (key=value, comma-separated)"}


def files() -> dict[Path, str]:
    """Generated text by file."""
    project, document = ROOT / "Pulumi.yaml", ROOT / "docs" / "configuration.md"
    component = ROOT / "component" / "ray_cluster.py"
    blocks = {
        project: {"keys": config_block()},
        document: {
            "keys": table(RayClusterArgs, defaults()),
            "pool's keys": table(WorkerPoolArgs, pool_defaults()),
            "outputs": outputs_table(),
        },
        component: {
            "pool's keys": declarations(WorkerPoolArgs),
            "arguments": declarations(RayClusterArgs),
            "outputs": declarations(RayCluster),
        },
    }
    texts = {}
    for path, parts in blocks.items():
        texts[path] = path.read_text()
        for part, block in parts.items():
            texts[path] = between_markers(texts[path], part, block)
    return texts


def between_markers(text: str, part: str, block: str) -> str:
    """Replace the lines between the markers `begin of the PART` and `end of the PART`."""
    before, begin, _, end, after = re.split(f"(.*(?:begin|end) of the {part}.*\n)", text)
    return before + begin + block + end + after


def config_block() -> str:
    """`config` section of Pulumi.yaml."""
    words, config = descriptions(RayClusterArgs), {}
    for name, default in defaults().items():
        kind = TYPES[type(default)] if isinstance(default, int | Pools) else "string"
        description = words[name] + FORMS.get(type(default), "")
        config[key_of(name)] = {"type": kind, "default": as_declared(default), "description": description}
    return yaml.safe_dump({"config": config}, sort_keys=False, width=1000)


def table(class_: type, values: Mapping[str, Any]) -> str:
    """Table of the keys in docs/configuration.md: those of the stack, or of a pool."""
    words, rows = descriptions(class_), "| key | type | default | description |\n|---|---|---|---|\n"
    for name, default in values.items():
        literal = "" if isinstance(default, Pools) else json.dumps(as_declared(default)).strip('"')
        code = f"`{literal}`" if literal else ""
        rows += f"| `{key_of(name)}` | {TYPES[type(default)]} | {code} | {words[name]} |\n"
    return rows


def outputs_table() -> str:
    """Table of the outputs that __main__.py exports."""
    words = _docstrings((ROOT / "infra" / "ray_cluster.py").read_text())
    exported = re.findall(r'pulumi\.export\("(\w+)"', (ROOT / "__main__.py").read_text())
    return "| output | description |\n|---|---|\n" + "".join(f"| `{name}` | {words[name]} |\n" for name in exported)


def descriptions(class_: type) -> dict[str, str]:
    """Field docstrings of arguments, which name other fields by their configuration keys."""
    words = _docstrings(inspect.getsource(class_))
    return {name: re.sub(r"[a-z]+(_[a-z]+)+", lambda field: key_of(field[0]), text) for name, text in words.items()}


def declarations(class_: type) -> str:
    """Annotated fields of a class with their docstrings, as Pulumi's analyzer reads them.

    It knows neither rules in annotations nor sequences and mappings.
    """
    words, lines = _docstrings(inspect.getsource(class_)), ""
    for name, annotation in class_.__annotations__.items():
        lines += f'    {name}: {_declared(annotation)}\n    """{words[name]}."""\n'
    return lines


def _declared(annotation: Any) -> str:
    if isinstance(annotation, str):  # an output's
        return annotation
    base = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    match get_args(base):
        case _ if base == Text:
            return "pulumi.Input[str]"
        case [element]:
            return f"list[{_declared(element)}]"
        case [_, element] if WorkerPoolArgs in get_args(element):
            return "dict[str, WorkerPool]"
        case [key, element]:
            return f"dict[{_declared(key)}, {_declared(element)}]"
    return base.__name__


def _docstrings(source: str) -> dict[str, str]:
    """Docstrings of annotated fields, without the full stop."""
    by_field = {}
    # ast.walk visits the statements of a class in source order, so a field is followed by its docstring.
    for field, docstring in pairwise(ast.walk(ast.parse(source))):
        match field, docstring:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                by_field[name] = words.removesuffix(".")
    return by_field


def as_declared(default: Any) -> Any:
    """Default as Pulumi.yaml holds it: fractions, lists and pairs are strings there."""
    if isinstance(default, Pools):
        return {}
    if isinstance(default, dict):
        return ",".join(f"{key}={value}" for key, value in default.items())
    if isinstance(default, tuple):
        return ",".join(default)
    return f"{default:g}" if isinstance(default, float) else default


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    for path, text in files().items():
        path.write_text(text)
