"""Document of a run: `run.json` in its folder, which `ray-on-ecs run` writes and the driver reads."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from ray_on_ecs.checks import is_run_name
from ray_on_ecs.config import RunConfig, defaults_in
from ray_on_ecs.errors import UsageError, one_line
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage


@dataclass(frozen=True, kw_only=True)
class RunDocument:
    """A run as its user gave it.

    Attributes:
        id: The run's ID. A run of the same name gets another one once this one is deleted.
        config: Its settings.
        code: Its code in the storage.
        storage: Its folder.
    """

    id: str
    config: RunConfig
    code: Code
    storage: RunStorage

    @classmethod
    def read(cls, uri: str, environment: Mapping[str, str]) -> Self:
        """Read the document of a run.

        Args:
            uri: The run's folder, below a folder or an `s3://bucket/prefix`.
            environment: The cluster's defaults, for settings that are not given.

        Raises:
            UsageError: There is not a run, or its document is broken or of another version.
        """
        path, _, name = uri.rstrip("/").rpartition("/")
        if path in ("", "s3:/") or not is_run_name(name):
            raise UsageError(f"{uri!r} is not the folder of a run, such as s3://bucket/runs/NAME")
        storage = RunStorage.open(path, name)
        document = storage.read_json(layout.SETTINGS)
        if document is None:
            raise UsageError(f"there is not a run at {uri}; ray-on-ecs run starts one")
        try:
            check_format(document, name)
            settings = {**defaults_in(environment), "storage_path": path, **document["settings"], "run_name": name}
            config, code = RunConfig.of(settings), Code.of(document["code"])
            found = cls(id=str(document["id"]), config=config, code=code, storage=storage)
        except (LookupError, TypeError, ValueError) as cause:
            raise UsageError(
                f"{layout.SETTINGS} in {uri} is broken ({one_line(cause)}); start the run again"
            ) from cause
        if config.storage_path.rstrip("/") == path:
            return found
        # A folder that the nodes share, which the command could not write.
        storage = RunStorage.open(config.storage_path, name)
        storage.write_json(layout.SETTINGS, document)
        return cls(id=found.id, config=config, code=code, storage=storage)


def write(
    storage: RunStorage, config: RunConfig, given: Collection[str], code: Code, earlier: Mapping[str, Any]
) -> None:
    """Write the document of a run.

    Args:
        storage: The run's folder.
        config: The settings.
        given: The names of those that are given: the cluster has its own defaults for others.
        code: The stored code.
        earlier: The document of the run's earlier command, whose ID stays; empty if there was none.
    """
    settings = {
        spec.name: value
        for spec in fields(config)
        if (value := getattr(config, spec.name)) != spec.default or spec.name in given
    }
    settings.pop("working_dir", None)  # the nodes have a copy of it
    run_id = earlier.get("id") or uuid.uuid4().hex[:8]
    document = {"format": layout.FORMAT, "id": run_id, "settings": settings, "code": asdict(code)}
    storage.write_json(layout.SETTINGS, document)


def read_earlier(storage: RunStorage) -> dict[str, Any]:
    """Return the document of a run's earlier command; empty if there was none.

    Raises:
        UsageError: It is broken, or of another version.
    """
    document = storage.read_json(layout.SETTINGS)
    if document is None:
        return {}
    check_format(document, storage.run_name)
    if not isinstance(document.get("settings"), dict):
        raise UsageError(f"--run-name: {storage.uri}/{layout.SETTINGS} has no settings; delete it or give another name")
    return document


def check_format(document: Mapping[str, Any], run_name: str) -> None:
    """Raise UsageError if a run's document has another format."""
    if document.get("format") != layout.FORMAT:
        raise UsageError(f"--run-name: run {run_name!r} was written by another version; give another --run-name")
