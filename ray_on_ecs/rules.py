"""Rules of a run's settings: pairs NAME=VALUE, metrics, numbers of workers and names. Errors name flag and value."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any

from ray_on_ecs.contract import GPUS
from ray_on_ecs.errors import UsageError

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
METRIC_NAME = r"[A-Za-z_][\w/.-]*"
# A complete number in a metric's text: not followed by a digit, fraction or exponent.
PLACEHOLDER = "{number}"
NUMBER = r"([+-]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|(?i:inf(?:inity)?|nan)\b))(?!\d|[.,]\d|[eE][+-]?\d)"
# The variables by which a launcher tells a worker its place; `--env` may turn the agent's store off.
OF_LAUNCHER = (
    r"(MAX_|LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|NNODES|NODE_RANK|NPROC_PER_NODE"
    r"|TORCHELASTIC_(?!USE_AGENT_STORE$).*"
)
# Those and the others that every script gets, with other values on each worker or node.
OF_RUNNER = rf"{OF_LAUNCHER}|RUN_(NAME|DIR|URI)|INPUT_.*"
QUOTE = r"['\"]?"
# The ends of names of variables that hold secrets.
OF_SECRETS = re.compile(r"(?i)(?:^|_|API)(?:TOKEN|KEY|SECRET|PASSWORD)$")

# A GPU or a pool with a number, as other tools write it: `8xH100` or `8 H100`; `H100:8`, `H100=8` or `H100x8`.
NUMBER_FIRST = r"(\d{1,2})(?: *[x*:] *| +)(.*\w)"
NUMBER_LAST = r"(\w.*?)(?: *[:=*] *| x *|(?<=[\dGSgs])x)(\d{1,2})"

# Files of packages that pip does not read as requirements, and how to get one that it does.
NOT_REQUIREMENTS = {
    r"pyproject\.toml|setup\.(py|cfg)": "give a file with the line '-e .'",
    r"uv\.lock": "uv export --no-emit-project -o requirements.txt writes one",
    r"poetry\.lock": "poetry export -o requirements.txt writes one",
    r"pdm\.lock": "pdm export -o requirements.txt writes one",
    r"Pipfile(\.lock)?": "pipenv requirements > requirements.txt writes one",
    r".+\.ya?ml|pixi\.(toml|lock)": "there, pip list --format=freeze > requirements.txt writes one; leave out what "
    "only conda has",
    r".+\.(whl|zip|tar\.gz)": "give a file with the line './{name}'",
}


def finite(value: Any) -> float | None:
    """Return a number; None for one that is not finite, and for anything else."""
    with suppress(OverflowError):  # an integer beyond the largest float
        return value if isinstance(value, int | float) and math.isfinite(value) else None
    return None


def worker_range(num_workers: int | str) -> tuple[int, int]:
    """Parse `4` or `1:4` into the minimum and maximum number of workers."""
    minimum, _, maximum = str(num_workers).partition(":")
    return int(minimum), int(maximum or minimum)


def pairs_of(items: tuple[str, ...]) -> dict[str, str]:
    """Return the values of NAME=VALUE by name."""
    return {name: value for name, _, value in (item.partition("=") for item in items)}


def check_pairs(flag: str, items: tuple[str, ...]) -> None:
    """Raise UsageError unless the items of a flag are NAME=VALUE, each name once."""
    form = {"--input": "NAME=URI", "--metric": "NAME=TEXT"}.get(flag, "NAME=VALUE")
    allowed, characters = (METRIC_NAME, "'_', '/', '.' and '-'") if flag == "--metric" else (NAME, "and '_'")
    names: set[str] = set()
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not re.fullmatch(allowed, name) or (not value and flag != "--env"):
            raise UsageError(
                f"{flag}: {item!r} is not allowed; it must be {form}, NAME of letters, digits {characters}"
            )
        if flag == "--metric" and name == "time":
            raise UsageError(f"--metric: {item!r} can't be given, because every record has a time; take another name")
        if flag == "--env" and re.fullmatch(OF_RUNNER, name):
            raise UsageError(f"--env: {name} can't be given, because the runner sets it for each worker; leave it out")
        if name in names:
            raise UsageError(f"{flag}: {name!r} is given twice")
        names.add(name)


def metric_pattern(text: str) -> str:
    """Return the regular expression of a metric's text, which is one itself or contains `{number}`."""
    if PLACEHOLDER not in text:
        return text
    before, _, after = text.partition(PLACEHOLDER)
    start = r"(?<!\w)" if re.match(r"\w", text) else ""  # 'loss: ' must not match in 'val_loss: '
    # Any white space stands for any other, and names and numbers may be in quotes, as in {'loss': '2.31'}.
    before, after = (r"\s+".join(re.escape(word) for word in re.split(r"\s+", part)) for part in (before, after))
    before = re.sub(r"(?<=\w)(?=[:=])", QUOTE, before)
    return f"{start}{before}{QUOTE}{NUMBER}{after}"


def check_metric(name: str, text: str) -> None:
    """Raise UsageError unless a metric's text has one place for the number."""
    if text.count(PLACEHOLDER) > 1:
        raise UsageError(f"--metric: {name}={text!r} must have one {PLACEHOLDER}; repeat the flag for more metrics")
    try:
        groups = re.compile(metric_pattern(text)).groups
    except re.error as cause:
        raise UsageError(f"--metric: {name}={text!r} is not a regular expression ({cause})") from cause
    if groups != 1:
        raise UsageError(
            f"--metric: {name}={text!r} must have one {PLACEHOLDER}, or one group in parentheses, for the number; it "
            f"has {groups or 'none'}"
        )


def secret_hints(variables: Mapping[str, str]) -> list[str]:
    """Return a line for each variable of `--env` whose name is that of a secret."""
    names = [name for name, value in variables.items() if value and OF_SECRETS.search(name)]
    shown = "shows its value in the results and in Ray's dashboard"
    return [f"--env: {name} {shown}; --secret {name} takes it from your shell and shows it nowhere" for name in names]


def names_of(text: str | None) -> tuple[str, ...]:
    """Return the names of a list with commas."""
    return () if text is None else tuple(name.strip() for name in text.split(","))


def check_names(flag: str, text: str | None) -> None:
    """Raise UsageError unless the value of `--gpu` or `--pool` is a list of names: other tools take more in it."""
    for name in names_of(text):
        commas = "put commas and no spaces between names, as in "
        if not name:
            raise UsageError(f"{flag}: {text!r} has an empty name; {commas}A,B")
        if flag == "--pool" and re.fullmatch(r"[\w-]+", name):
            continue
        family, dot, _ = name.lower().removeprefix("ml.").partition(".")
        if dot or family in GPUS:
            way_on = f"use its GPU, --gpu {shlex.quote(GPUS[family])}," if family in GPUS else "use its GPU's name"
            raise UsageError(f"{flag}: {name!r} is an instance type; {way_on} or --pool with the name of a pool")
        if flag == "--gpu" and name.isdecimal():
            raise UsageError(f"{flag}: {name!r} is a number; use --num-workers {name}, and {flag} with a GPU's name")
        first, last = re.fullmatch(NUMBER_FIRST, name), re.fullmatch(NUMBER_LAST, name)
        if first or last:
            alone, number = first.group(2, 1) if first else last.group(1, 2) if last else ("", "")
            alone = alone.partition(":")[0]  # dstack has the memory in between
            way_on = f"{flag} {shlex.quote(alone)} --num-workers {number}"
            raise UsageError(f"{flag}: {name!r} has a number; use {way_on}: a worker for each GPU")
        words = re.findall(r"[\w-]+", name)
        is_list = flag == "--pool" or {word.lower() for word in words} <= {gpu.lower() for gpu in GPUS.values()}
        if re.search(r"[^\w -]", name) or (" " in name and is_list):
            raise UsageError(f"{flag}: {name!r} is not a name; {commas}{','.join(words) or 'A,B'}")


def check_range(flag: str, value: int | str | None) -> None:
    """Raise UsageError unless a flag's value is a positive number, a range such as `1:4`, or None."""
    if value is None:
        return
    if re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", str(value)):
        minimum, maximum = worker_range(value)
        if minimum <= maximum:
            return
    raise UsageError(
        f"{flag}: {value!r} is not allowed; it must be a number from 1, or a minimum and a maximum such as 1:4"
    )


def is_run_name(name: str) -> bool:
    """Return whether a run can have this name. A folder with another one is not a run."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name) is not None


def check_run_name(name: str | None) -> None:
    """Raise UsageError unless a run can have this name."""
    if name is not None and not is_run_name(name):
        raise UsageError(
            f"--run-name: {name!r} is not allowed; it becomes a folder, so use letters, digits, '.', '_' and '-', "
            "up to 128, starting with a letter or digit"
        )


def check_requirements(path: str) -> None:
    """Raise UsageError for a file of packages that is not a requirements file of pip."""
    name = PurePath(path).name
    for pattern, cure in NOT_REQUIREMENTS.items():
        if re.fullmatch(pattern, name):
            line = f"--requirements: {path!r} is not a requirements file of pip"
            raise UsageError(f"{line}; {cure.format(name=name)}")
