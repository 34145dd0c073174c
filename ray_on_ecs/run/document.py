"""Document of a run: `run.json` in its folder, which `ray-on-ecs run` writes and the driver reads."""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from ray_on_ecs.config import RunConfig, defaults_in
from ray_on_ecs.errors import StorageError, UsageError, one_line
from ray_on_ecs.rules import is_run_name
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage

# Key of a job's metadata: the digest of the document with which it was submitted.
DIGEST = "document"
# Keys of the document that the driver writes.
OF_DRIVER = ("pool", "network")


@dataclass(frozen=True, kw_only=True)
class RunDocument:
    """A run as its user gave it.

    Attributes:
        id: The run's ID. A run of the same name gets another one once this one is deleted.
        config: Its settings.
        code: Its code in the storage.
        storage: Its folder.
        uri: The folder from which the document was read; another one if the nodes share a folder for their runs.
        content: The document.
        noted: What the driver has added to it.
    """

    id: str
    config: RunConfig
    code: Code
    storage: RunStorage
    uri: str
    content: Mapping[str, Any]
    noted: dict[str, Any] = field(default_factory=dict)
    _noting: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @classmethod
    def read(cls, uri: str, environment: Mapping[str, str], digest: str | None = None) -> Self:
        """Read the document of a run.

        Args:
            uri: The run's folder, below a folder or an `s3://bucket/prefix`.
            environment: The cluster's defaults, for settings that are not given.
            digest: That of the document with which the run was submitted, or None.

        Raises:
            UsageError: There is not a run, or its document is broken, of another version, or of another command.
            StorageError: The storage can't be read.
        """
        path, _, name = uri.rstrip("/").rpartition("/")
        if path in ("", "s3:/") or not is_run_name(name):
            raise UsageError(f"{uri!r} is not the folder of a run, such as s3://bucket/runs/NAME")
        storage = RunStorage.open(path, name)
        try:
            content = storage.read_json(layout.SETTINGS)
        except OSError as cause:
            raise StorageError(f"{uri} can't be read ({one_line(cause)}); start the run again") from cause
        if content is None:
            raise UsageError(f"there is not a run at {uri}; ray-on-ecs run starts one")
        if digest not in (None, digest_of(content)):
            raise UsageError(f"another command has written {uri}/{layout.SETTINGS}, too; start the run again")
        try:
            check_format(content, name)
            given = {"storage_path": path, **content["settings"], "run_name": name}
            settings = {**defaults_in(environment, given), **given}
            run_id, config, code = content["id"], RunConfig.of(settings), Code(**content["code"])
        except (AttributeError, LookupError, TypeError, UsageError, ValueError) as cause:
            problem = f"{uri}/{layout.SETTINGS} can't be used ({one_line(cause)})"
            raise UsageError(f"{problem}; start the run again") from cause
        if config.storage_path.rstrip("/") != path:  # a folder that the nodes share, which the command can't write
            storage = RunStorage.open(config.storage_path, name)
        return cls(id=run_id, config=config, code=code, storage=storage, uri=f"{path}/{name}", content=_given(content))

    def note(self, **found: Mapping[str, Any]) -> None:
        """Write what the driver has found, by the keys of `OF_DRIVER`; what the storage refuses is left out.

        Several threads may call it: the last document has all of it.
        """
        with self._noting, suppress(OSError):
            self.noted.update(found)
            self.storage.write_json(layout.SETTINGS, {**self.content, **self.noted})

    def keep(self) -> None:
        """Write the document into the run's folder if the command could not; call it with the run's lock held."""
        if self.storage.uri != self.uri and _given(self.storage.read_json(layout.SETTINGS) or {}) != self.content:
            self.storage.write_json(layout.SETTINGS, self.content)


def write(
    storage: RunStorage, config: RunConfig, given: Collection[str], code: Code, earlier: Mapping[str, Any]
) -> str:
    """Write the document of a run, and return its digest for the job's metadata.

    Args:
        storage: The run's folder.
        config: The settings.
        given: The names of the settings that are given; the cluster's defaults hold for the others.
        code: The stored code.
        earlier: The document of the run's earlier command, whose ID stays; empty if there was none.

    Raises:
        StorageError: It can't be written.
    """
    values = {spec.name: getattr(config, spec.name) for spec in fields(config)}
    changed = {spec.name for spec in fields(config) if values[spec.name] != spec.default}
    settings = {name: value for name, value in values.items() if value is not None and name in {*given, *changed}}
    settings.pop("working_dir", None)  # the nodes have a copy of it
    run_id = earlier.get("id") or uuid.uuid4().hex[:8]
    document = {"format": layout.FORMAT, "id": run_id, "settings": settings, "code": asdict(code)}
    try:
        storage.write_json(layout.SETTINGS, document)
    except OSError as cause:
        file = f"{storage.uri}/{layout.SETTINGS}"
        raise StorageError(f"{file} can't be written ({one_line(cause)}); try again") from cause
    return digest_of(document)


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the digest of a document, which is the same before it is written and after it is read."""
    return hashlib.sha256(json.dumps(_given(content), sort_keys=True).encode()).hexdigest()


def _given(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document as the command has written it."""
    return {key: value for key, value in content.items() if key not in OF_DRIVER}


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
