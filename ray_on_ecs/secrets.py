"""Secrets of a run: stored outside its folder, read by its nodes, masked in its output, and deleted at its end.

A stored value is a SecureString in SSM's Parameter Store on a stack, whose containers have a prefix for it, and a file
of this user elsewhere. `NAME=arn:...` is a secret in AWS Secrets Manager, which is only read.
https://docs.aws.amazon.com/systems-manager/latest/userguide/secure-string-parameter-kms-encryption.html
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from ray_on_ecs.aws import Refused, client, translated
from ray_on_ecs.contract import SECRETS_KEY_VARIABLE, SECRETS_VARIABLE
from ray_on_ecs.errors import ResourceError, TrainingError, UsageError
from ray_on_ecs.private_folder import at_home
from ray_on_ecs.rules import NAME, OF_RUNNER

MASK = "***"
# A shorter value would also mask other output. The largest value is SSM's limit for a standard parameter.
SHORTEST, LARGEST_BYTES = 4, 4096
# Characters of a line of base64: by openssl, and by the program of this name and MIME.
BASE64_WIDTHS = 64, 76
ARN = r"arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:\d{12}:secret:[\w/+=.@-]+"
# The variables of the runner and of what starts the script: see docs/scripts.md.
NOT_SECRET = re.compile(
    rf"{OF_RUNNER}|PATH|HOME|TMPDIR|LD_.*|PYTHON.*|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|TF_CONFIG"
    r"|TORCHELASTIC_.*|GIT_(COMMIT|DIRTY)|_*RAY_.*|SECRETS_(PREFIX|KEY)"
)
# Stay in the environment: this process needs them.
OF_AWS = "AWS_"
# SSM's limit for GetParameters and DeleteParameters.
NAMES_A_CALL = 10
# Many attempts: all nodes of a run ask at once, and SSM answers 40 requests per second of an account.
LIMITS: dict[str, Any] = {"connect_seconds": 10, "read_seconds": 20, "attempts": 10}
REFUSED = {"AccessDenied", "AccessDeniedException", "ResourceNotFoundException", "DecryptionFailure"}


def parse(items: Sequence[str]) -> dict[str, str]:
    """Return the ARN of each secret by its name, empty for a stored one, from the values of `--secret`.

    A UsageError does not contain a secret that was typed by mistake.
    """
    arns: dict[str, str] = {}
    for item in items:
        name, equals, arn = item.partition("=")
        if not is_name(name):
            raise UsageError("--secret: give NAME or NAME=ARN, with a NAME of letters, digits and '_'")
        if equals and not re.fullmatch(ARN, arn):
            raise UsageError(
                f"--secret: the text after {name}= is not an ARN of a secret in AWS Secrets Manager; others could see "
                f"a value that is typed: export {name}, and give --secret {name}"
            )
        if NOT_SECRET.fullmatch(name):
            raise UsageError(f"--secret: {name} is a variable of the runner; give the secret another name")
        if name in arns:
            raise UsageError(f"--secret: {name!r} is given twice")
        arns[name] = arn
    return arns


def is_name(text: object) -> bool:
    """Return True if a text can be the name of a secret, which is also the name of its file."""
    return isinstance(text, str) and re.fullmatch(NAME, text) is not None


def earlier_items(settings: Mapping[str, Any]) -> list[str]:
    """Return the values of `--secret` of an earlier command, whose settings any writer to the storage may forge."""
    items = settings.get("secret")
    texts = [item for item in items if isinstance(item, str)] if isinstance(items, list) else []
    return [text for text in texts if re.fullmatch(f"{NAME}(={ARN})?", text)]


def stored_names(items: Sequence[str]) -> list[str]:
    """Return the names of the secrets that are stored with the run."""
    return [name for name, arn in parse(items).items() if not arn]


def take_from_environment(items: Sequence[str]) -> dict[str, str]:
    """Return the values to store, and remove them from this process's environment, which Ray's processes inherit."""
    values = {name: os.environ.get(name, "") for name in stored_names(items)}
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


def read(items: Sequence[str], uri: str) -> dict[str, str]:
    """Return the values of the secrets in `--secret` by name, for the run with this folder.

    UsageError if a secret is deleted, or this cluster may not read it; ResourceError if AWS doesn't answer.
    """
    arns = parse(items)
    names = [name for name, arn in arns.items() if not arn]
    stored = store(uri).read(names) if names else {}
    missing = [name for name in names if name not in stored]
    if missing:
        raise UsageError(
            f"--secret: the run's value of {', '.join(missing)} is deleted; give the same command again, with the "
            "variable set"
        )
    return {name: _read_from_secrets_manager(name, arn) if arn else stored[name] for name, arn in arns.items()}


def read_on_node(items: Sequence[str], uri: str) -> dict[str, str]:
    """Return the values like `read`; OSError, after which the runner retries, if AWS doesn't answer."""
    try:
        return read(items, uri)
    except ResourceError as cause:
        raise OSError(str(cause)) from cause


@dataclass(frozen=True)
class Parameters:
    """A run's secrets in SSM's Parameter Store, encrypted with the stack's KMS key or the AWS managed key `aws/ssm`.

    Like `Files`, it can repeat each call: AWS may carry one out and lose the answer. `key` returns the ARN of the
    stack's key, empty without one.
    """

    path: str
    call: Callable[..., Any]
    key: Callable[[], str] = lambda: ""

    def put(self, values: Mapping[str, str]) -> None:
        """Store values by name, and overwrite existing ones."""
        key = self.key()
        options = {"Type": "SecureString", "Overwrite": True, **({"KeyId": key} if key else {})}
        try:
            for name, value in values.items():
                path = f"{self.path}/{name}"
                self.call("put_parameter", Name=path, Value=value, **options)
        except TrainingError as cause:  # only its code: AWS's message may contain the value
            kind = UsageError if isinstance(cause, UsageError) else ResourceError
            code = getattr(cause, "code", None) or type(cause.__cause__ or cause).__name__
            raise kind(f"--secret: {', '.join(values)} could not be stored ({code})") from None

    def read(self, names: Sequence[str]) -> dict[str, str]:
        """Return the values by name, without missing ones."""
        values: dict[str, str] = {}
        for paths in self._path_batches(names):
            for parameter in self.call("get_parameters", Names=paths, WithDecryption=True)["Parameters"]:
                values[parameter["Name"].rpartition("/")[2]] = parameter["Value"]
        return values

    def delete(self, names: Sequence[str]) -> None:
        """Delete the values that exist."""
        for paths in self._path_batches(names):
            self.call("delete_parameters", Names=paths)

    def _path_batches(self, names: Sequence[str]) -> Iterator[list[str]]:
        for first in range(0, len(names), NAMES_A_CALL):
            yield [f"{self.path}/{name}" for name in names[first : first + NAMES_A_CALL]]


@dataclass(frozen=True)
class Files:
    """A run's secrets in files that only this user can read."""

    folder: Path

    def put(self, values: Mapping[str, str]) -> None:
        """Store values by name, and overwrite existing ones; ResourceError, with none of them stored, if it can't."""
        try:
            for parent in reversed([self.folder, *self.folder.parents]):
                parent.mkdir(mode=0o700, exist_ok=True)
            for name, value in values.items():
                new = self.folder / f".{name}.{os.getpid()}"
                with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                    file.write(value)
                new.replace(self.folder / name)
        except OSError as cause:
            with suppress(OSError):
                self.delete([*values])
            line = f"--secret: {', '.join(values)} could not be stored in {self.folder} ({cause.strerror})"
            raise ResourceError(f"{line}; free some space, or set HOME to another folder") from cause

    def read(self, names: Sequence[str]) -> dict[str, str]:
        """Return the values by name, without missing ones."""
        return {name: (self.folder / name).read_text() for name in names if (self.folder / name).is_file()}

    def delete(self, names: Sequence[str]) -> None:
        """Delete the values that exist."""
        for name in names:
            for file in (self.folder / name, *self.folder.glob(f".{name}.*")):  # the latter of a killed command
                file.unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            self.folder.rmdir()
            self.folder.parent.rmdir()


Store = Parameters | Files


def store(uri: str) -> Store:
    """Return the store of a run, by its folder, for the cluster's processes."""
    prefix = os.environ.get(SECRETS_VARIABLE)
    if prefix:
        return parameters(prefix, uri, partial(ask, "ssm"), partial(os.environ.get, SECRETS_KEY_VARIABLE, ""))
    return Files(at_home() / "secrets" / _place(uri))


def parameters(prefix: str, uri: str, call: Callable[..., Any], key: Callable[[], str]) -> Parameters:
    """Return the store of a run below a cluster's prefix, which calls SSM's methods by `call`; see Parameters."""
    return Parameters(f"{prefix}/{_place(uri)}", call, key)


class Masker:
    """Replaces each line of the values by `***` in a text, also URL- and JSON-encoded, and the base64 of a whole value.

    Not replaced are the base64 of a text that contains a value, and its last line of fewer than SHORTEST characters.
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        secret_texts: set[str] = set()
        for value in values:
            for line in map(str.strip, value.splitlines()):
                secret_texts |= {line, quote(line), quote(line, safe=""), quote_plus(line), json.dumps(line)[1:-1]}
            for whole in (value, value.strip(), value.strip() + "\n"):  # echo adds the last character
                secret_texts |= _base64(whole.encode())
        # The longest first, so that one that contains another is masked as a whole.
        masked = sorted((text for text in secret_texts if len(text) >= SHORTEST), key=len, reverse=True)
        self.longest = len(masked[0]) if masked else 0  # characters of what it replaces
        self._pattern = re.compile("|".join(map(re.escape, masked))) if masked else None

    def __call__(self, text: str) -> str:
        """Return the text without the values."""
        return self._pattern.sub(MASK, text) if self._pattern else text


def _base64(value: bytes) -> set[str]:
    """Return the base64 in both alphabets, as one line and each piece of several."""
    texts: set[str] = set()
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        encoded = encode(value).decode().rstrip("=")
        for width in (len(encoded), *BASE64_WIDTHS):
            texts |= {encoded[at : at + width] for at in range(0, len(encoded), width)}
    return texts


def mask_own_output(values: Collection[str]) -> None:
    """Mask values in this process's sys.stdout and sys.stderr."""
    mask = Masker(values)
    if values:
        sys.stdout, sys.stderr = _Masked(sys.stdout, mask), _Masked(sys.stderr, mask)


class _Masked:
    """Text stream that masks values within a single write."""

    def __init__(self, stream: Any, mask: Callable[[str], str]) -> None:
        self._stream = stream
        self._mask = mask

    def write(self, text: str) -> int:
        self._stream.write(self._mask(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def ask(service: str, method: str, options: Mapping[str, Any] = LIMITS, **arguments: Any) -> Any:
    """Call AWS through a client with these options; UsageError if it refuses, ResourceError if it can't be reached."""
    try:
        with translated(service):
            return getattr(client(service, **options), method)(**arguments)
    except Refused as cause:
        if cause.code in REFUSED:
            raise UsageError(str(cause)) from cause.__cause__
        raise


def _read_from_secrets_manager(name: str, arn: str) -> str:
    try:
        region = arn.split(":")[3]
        response = ask("secretsmanager", "get_secret_value", {**LIMITS, "region_name": region}, SecretId=arn)
    except UsageError as cause:
        raise UsageError(f"--secret: {name} can't be read ({cause}); the key jobSecrets names what jobs may") from cause
    value = response.get("SecretString", "")
    _check_length(name, value)
    return value


def _check_length(name: str, value: str) -> None:
    """Raise UsageError for a value that is too short to be masked."""
    if max((len(line.strip()) for line in value.splitlines()), default=0) < SHORTEST:
        raise UsageError(
            f"--secret: the value of {name} has fewer than {SHORTEST} characters, and would hide much else of the "
            "output; give a longer one, or --env"
        )


def _place(uri: str) -> str:
    """Return the path of a run's secrets below the prefix; the hash distinguishes equal names in other storages."""
    return f"{uri.rpartition('/')[2]}/{hashlib.sha256(uri.encode()).hexdigest()[:8]}"


if __name__ == "__main__":  # at the end of a local job's driver
    with suppress(OSError, TrainingError):
        store(sys.argv[1]).delete(sys.argv[2:])
