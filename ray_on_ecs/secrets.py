"""Secrets of a run: stored outside its folder, read by its nodes, hidden in its output, and deleted at its end.

A stored value is a SecureString of SSM in a cluster whose containers name a prefix for it, and else a file of this
user. `NAME=arn:...` is a secret of AWS Secrets Manager, which is only read.
https://docs.aws.amazon.com/systems-manager/latest/userguide/secure-string-parameter-kms-encryption.html
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from ray_on_ecs.contract import SECRETS_VARIABLE
from ray_on_ecs.errors import ResourceError, TrainingError, UsageError, one_line

MASK = "***"
# A shorter value would hide much else of the output. A standard parameter of SSM takes the largest.
SHORTEST, LARGEST_BYTES = 4, 4096
NAME = r"[A-Za-z_][A-Za-z0-9_]*"
ARN = r"arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:\d{12}:secret:[\w/+=.@-]+"
# The variables of the runner and of what starts the script: see docs/scripts.md.
OF_RUNNER = re.compile(
    r"PATH|HOME|TMPDIR|LD_.*|PYTHON.*|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|TF_CONFIG"
    r"|(MAX_|LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME"
    r"|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|RUN_(NAME|DIR|URI)|GIT_(COMMIT|DIRTY)|INPUT_.*|_*RAY_.*|SECRETS_PREFIX"
)
# This process needs them itself.
OF_AWS = "AWS_"
# SSM takes so many names in one call.
NAMES_A_CALL = 10
CONNECT_SECONDS, READ_SECONDS, ATTEMPTS = 10, 20, 10
REFUSED = {"AccessDenied", "AccessDeniedException", "ResourceNotFoundException", "DecryptionFailure"}


def parse(given: Sequence[str]) -> dict[str, str]:
    """Return the ARN of each secret by its name, empty for one that is stored.

    Args:
        given: The values of `--secret`.

    Raises:
        UsageError: One breaks a rule. The message has nothing of a value that was typed by mistake.
    """
    found: dict[str, str] = {}
    for each in given:
        name, equals, arn = each.partition("=")
        if not re.fullmatch(NAME, name):
            raise UsageError("--secret: give NAME or NAME=ARN, with a NAME of letters, digits and '_'")
        if equals and not re.fullmatch(ARN, arn):
            raise UsageError(
                f"--secret: the text after {name}= is not an ARN of a secret in AWS Secrets Manager; others could see "
                f"a value that is typed: export {name}, and give --secret {name}"
            )
        if OF_RUNNER.fullmatch(name):
            raise UsageError(f"--secret: {name} is a variable of the runner; give the secret another name")
        if name in found:
            raise UsageError(f"--secret: {name!r} is given twice")
        found[name] = arn
    return found


def stored_names(given: Sequence[str]) -> list[str]:
    """Return the names of the secrets that are stored with the run."""
    return [name for name, arn in parse(given).items() if not arn]


def take_from_environment(given: Sequence[str]) -> dict[str, str]:
    """Return the values to store, and remove them from this process's environment, which Ray's processes inherit.

    Raises:
        UsageError: A variable is not set, or its value can't be hidden or stored.
    """
    values = {name: os.environ.get(name, "") for name in stored_names(given)}
    for name, value in values.items():
        if not value:
            raise UsageError(f"--secret: {name} is not set; export it, and give the same command again")
        _check_length(name, value)
        if len(value.encode()) > LARGEST_BYTES:
            raise UsageError(
                f"--secret: the value of {name} has more than {LARGEST_BYTES:,} bytes; put it into AWS Secrets "
                f"Manager, and give --secret {name}=ARN"
            )
    for name in values:
        if not name.startswith(OF_AWS):
            del os.environ[name]
    return values


def read(given: Sequence[str], uri: str) -> dict[str, str]:
    """Return the values of a run's secrets by name.

    Args:
        given: The values of `--secret`.
        uri: The run's folder.

    Raises:
        UsageError: One is not there any more, or this cluster may not read it.
        ResourceError: AWS doesn't answer.
    """
    names = stored_names(given)
    found = store(uri).read(names) if names else {}
    if missing := [name for name in names if name not in found]:
        raise UsageError(
            f"--secret: the run's value of {', '.join(missing)} is deleted; give the same command again, with the "
            "variable set"
        )
    return {name: _read_from_secrets_manager(name, arn) if arn else found[name] for name, arn in parse(given).items()}


def read_on_node(given: Sequence[str], uri: str) -> dict[str, str]:
    """Return the values as `read` does, on a node that can be replaced or started again.

    Raises:
        UsageError: See `read`.
        OSError: AWS doesn't answer, which may pass.
    """
    try:
        return read(given, uri)
    except ResourceError as cause:
        raise OSError(str(cause)) from cause


class Store(Protocol):
    """The stored secrets of one run. Each call may be repeated."""

    def put(self, values: Mapping[str, str]) -> None:
        """Store values by name, in the place of those that are there."""
        ...

    def read(self, names: Sequence[str]) -> dict[str, str]:
        """Return the values of these names; one that is not stored is left out."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete the values of these names, as far as they are there."""
        ...


def store(uri: str) -> Store:
    """Return the store of the run with this folder, as the processes of its cluster find it."""
    if prefix := os.environ.get(SECRETS_VARIABLE):
        return Parameters(f"{prefix}/{_place(uri)}", lambda method, **given: ask("ssm", method, **given))
    return Files(Path.home() / ".ray-on-ecs" / "secrets" / _place(uri))


def parameters(prefix: str, uri: str, call: Callable[..., Any]) -> Store:
    """Return the store of that run in SSM, as another machine finds it.

    Args:
        prefix: What the names of the cluster's parameters begin with.
        uri: The run's folder.
        call: Calls a method of SSM with keyword arguments; raises a TrainingError.
    """
    return Parameters(f"{prefix}/{_place(uri)}", call)


@dataclass(frozen=True)
class Parameters:
    """Secrets in SSM's Parameter Store, encrypted with the key that AWS manages for it."""

    path: str
    call: Callable[..., Any]

    def put(self, values: Mapping[str, str]) -> None:
        """See Store."""
        try:
            for name, value in values.items():
                given = {"Name": f"{self.path}/{name}", "Value": value, "Type": "SecureString", "Overwrite": True}
                self.call("put_parameter", **given)
        except TrainingError as cause:  # AWS may repeat what it refuses
            kind = UsageError if isinstance(cause, UsageError) else ResourceError
            raise kind(f"--secret: {', '.join(values)} could not be stored ({_code(cause)})") from None

    def read(self, names: Sequence[str]) -> dict[str, str]:
        """See Store."""
        answers = [self.call("get_parameters", Names=each, WithDecryption=True) for each in self._paths(names)]
        return {each["Name"].rpartition("/")[2]: each["Value"] for found in answers for each in found["Parameters"]}

    def delete(self, names: Sequence[str]) -> None:
        """See Store."""
        for each in self._paths(names):
            self.call("delete_parameters", Names=each)

    def _paths(self, names: Sequence[str]) -> Iterator[list[str]]:
        for first in range(0, len(names), NAMES_A_CALL):
            yield [f"{self.path}/{name}" for name in names[first : first + NAMES_A_CALL]]


@dataclass(frozen=True)
class Files:
    """Secrets in files that only this user may read."""

    folder: Path

    def put(self, values: Mapping[str, str]) -> None:
        """See Store."""
        for parent in reversed([self.folder, *self.folder.parents]):
            parent.mkdir(mode=0o700, exist_ok=True)
        for name, value in values.items():
            new = self.folder / f".{name}.{os.getpid()}"
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(value)
            new.replace(self.folder / name)

    def read(self, names: Sequence[str]) -> dict[str, str]:
        """See Store."""
        return {name: (self.folder / name).read_text() for name in names if (self.folder / name).is_file()}

    def delete(self, names: Sequence[str]) -> None:
        """See Store."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # others are in it
            self.folder.rmdir()
            self.folder.parent.rmdir()


def masker(values: Iterable[str]) -> Callable[[str], str]:
    """Return a function that replaces values in a text by `***`: line by line, also as URLs and JSON have them."""
    lines = {line.strip() for value in values for line in value.splitlines()}
    shown = {text for line in lines for text in (line, quote(line, safe=""), json.dumps(line)[1:-1])}
    hidden = sorted((text for text in shown if len(text) >= SHORTEST), key=len, reverse=True)
    if not hidden:
        return lambda text: text
    pattern = re.compile("|".join(map(re.escape, hidden)))
    return lambda text: pattern.sub(MASK, text)


def mask_own_output(values: Collection[str]) -> None:
    """Hide values in what this process prints by Python's standard streams."""
    mask = masker(values)
    if values:
        sys.stdout, sys.stderr = _Masked(sys.stdout, mask), _Masked(sys.stderr, mask)


class _Masked:
    """A text stream that hides values in what is written at once."""

    def __init__(self, stream: Any, mask: Callable[[str], str]) -> None:
        self._stream, self._mask = stream, mask

    def write(self, text: str) -> int:
        """See io.TextIOBase."""
        self._stream.write(self._mask(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """See io.IOBase."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def ask(service: str, method: str, region: str | None = None, **given: Any) -> Any:
    """Call AWS as a process of the cluster; raises what `call` does."""
    import boto3
    from botocore.config import Config

    retries = {"total_max_attempts": ATTEMPTS, "mode": "standard"}
    config = Config(connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS, retries=retries)
    return call(boto3.client(service, region_name=region, config=config), method, **given)


def call(client: Any, method: str, **given: Any) -> Any:
    """Call AWS by a boto3 client.

    Raises:
        UsageError: AWS refuses.
        ResourceError: It can't be reached.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return getattr(client, method)(**given)
    except ClientError as cause:
        kind = UsageError if cause.response["Error"]["Code"] in REFUSED else ResourceError
        raise kind(one_line(cause)) from cause
    except BotoCoreError as cause:
        raise ResourceError(f"AWS can't be reached ({one_line(cause)})") from cause


def _code(cause: TrainingError) -> str:
    """Return the code of an error of AWS, without its text."""
    under = cause.__cause__
    if response := getattr(under, "response", None):
        return response["Error"]["Code"]
    return getattr(cause, "code", None) or type(under or cause).__name__


def _read_from_secrets_manager(name: str, arn: str) -> str:
    try:
        found = ask("secretsmanager", "get_secret_value", arn.split(":")[3], SecretId=arn)
    except UsageError as cause:
        raise UsageError(f"--secret: {name} can't be read ({cause}); the key jobSecrets names what jobs may") from cause
    value = found.get("SecretString", "")
    _check_length(name, value)
    return value


def _check_length(name: str, value: str) -> None:
    """Raise UsageError for a value that can't be hidden."""
    if max((len(line.strip()) for line in value.splitlines()), default=0) < SHORTEST:
        raise UsageError(
            f"--secret: the value of {name} has fewer than {SHORTEST} characters, and would hide much else of the "
            "output; give a longer one, or --env"
        )


def _place(uri: str) -> str:
    """Return where the secrets of a run are below the prefix: under another storage path its name is another run."""
    return f"{uri.rpartition('/')[2]}/{hashlib.sha256(uri.encode()).hexdigest()[:8]}"
