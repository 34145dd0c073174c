"""Generator of Pulumi.yaml's keys and docs/configuration.md from RayClusterArgs.

`python -m component.generate --write` writes them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from component.ray_cluster import docstrings
from infra.config.args import RayClusterArgs, defaults
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
    blocks = {
        project: {"keys": config_block()},
        document: {
            "keys": table(RayClusterArgs, defaults()),
            "pool's keys": table(WorkerPoolArgs, pool_defaults()),
            "outputs": outputs_table(),
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
    words = _words(RayCluster)
    exported = re.findall(r'pulumi\.export\("(\w+)"', (ROOT / "__main__.py").read_text())
    return "| output | description |\n|---|---|\n" + "".join(f"| `{name}` | {words[name]} |\n" for name in exported)


def descriptions(class_: type) -> dict[str, str]:
    """Field docstrings of arguments, which name other fields by their configuration keys."""
    words = _words(class_)
    return {name: re.sub(r"[a-z]+(_[a-z]+)+", lambda field: key_of(field[0]), text) for name, text in words.items()}


def _words(class_: type) -> dict[str, str]:
    """Docstrings of fields without the full stop."""
    return {name: text.removesuffix(".") for name, text in docstrings(class_).items()}


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
