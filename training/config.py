"""The settings of a run: one frozen dataclass, from which come the flags, their help and the saved JSON.

A flag's default can be set by an environment variable, `--storage-path` by `TRAINING_STORAGE_PATH`; that is how the
cluster's task definition hands over the bucket and the number of GPUs.
"""

import argparse
import math
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any, NoReturn

from training.errors import UsageError

ENVIRONMENT_PREFIX = "TRAINING_"
DATASETS = ("auto", "fashion-mnist", "digits", "synthetic")
DEVICES = ("auto", "cuda", "cpu")
DEFAULT_LR = {"adamw": 3e-3, "sgd": 0.1}
DEFAULT_WEIGHT_DECAY = {"adamw": 0.05, "sgd": 5e-4}
ON_OFF = ("on", "off")
AUTO_ON_OFF = ("auto", *ON_OFF)
DTYPES = ("auto", "bf16", "fp32")

EPILOG = """\
examples:
  python -m training --dataset digits --epochs 3
  python -m training --data-dir ~/data/fashion-mnist --batch-size 128 --num-workers 4
  python -m training --storage-path s3://my-bucket/runs --run-name baseline

A run that was cut off continues when it is started again with the same --run-name and the same other flags.
Every flag has an environment variable that sets its default: --batch-size reads TRAINING_BATCH_SIZE.

exit status: 0 finished, 1 the training failed, 2 a setting or a data set can't be used (nothing was trained),
3 the cluster had too few free workers in the time given, 130 interrupted.
"""


def _each(defaults: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} for {name}" for name, value in defaults.items())


def setting(default: Any, description: str, **rules: Any) -> Any:
    """A dataclass field that is also a flag.

    Args:
        default: The value where neither flag nor environment variable gives one.
        description: The flag's line in `--help`.
        **rules: `at_least`, `at_most` (inclusive), `above` (exclusive), `choices`, `metavar`; and `group`, under which
            `--help` lists this setting and those that follow.
    """
    return field(default=default, metadata={"description": description, **rules})


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Everything that decides a run. Values are checked on construction.

    Raises:
        UsageError: A value breaks its rule; the message names the flag, the value and the rule.
    """

    model: str = setting(
        "resnet18", "resnet18, or package.module:function of your own (see the README)", group="what to train"
    )
    dataset: str = setting(
        "fashion-mnist", "what to train on; auto: fashion-mnist if it can be had, else digits", choices=DATASETS
    )
    data_dir: str | None = setting(
        None, "folder that holds Fashion-MNIST's four IDX files, gzipped or not, instead of a download", metavar="DIR"
    )
    samples: int = setting(60_000, "training images in the synthetic data set", at_least=10)
    epochs: int = setting(4, "passes over the training set", at_least=1, group="how")
    batch_size: int = setting(
        64, "images a step on each worker; the global batch is this times the workers", at_least=1
    )
    optimizer: str = setting(
        "adamw", "both have a one-cycle schedule; sgd has Nesterov momentum", choices=tuple(DEFAULT_LR)
    )
    lr: float | None = setting(
        None,
        "peak learning rate at a global batch of 256; it grows with the batch, for adamw with its square root "
        f"(default: {_each(DEFAULT_LR)})",
        above=0.0,
    )
    weight_decay: float | None = setting(
        None, f"decay of the weights, but of biases and norms (default: {_each(DEFAULT_WEIGHT_DECAY)})", at_least=0.0
    )
    label_smoothing: float = setting(0.0, "share of a label that goes to all classes", at_least=0.0, at_most=1.0)
    mirror: str = setting("on", "mirror half of the training images, where the data set allows it", choices=ON_OFF)
    shift: int = setting(0, "move training images by up to so many pixels either way", at_least=0, at_most=16)
    norm_batch: int = setting(
        64, "images that batch norm normalizes together, whatever the number of workers; 0: each worker's", at_least=0
    )
    seed: int = setting(0, "seed of the weights, the shuffling and the augmentation", at_least=0, at_most=2**32 - 1)
    precision: str = setting(
        "auto", "autocast to bf16 or none; auto: bf16 on GPUs that have it", choices=DTYPES, group="how fast"
    )
    gradient_dtype: str = setting(
        "auto", "gradients on the wire between workers; auto: as the precision", choices=DTYPES
    )
    channels_last: str = setting("auto", "memory layout of images and weights; auto: on GPUs", choices=AUTO_ON_OFF)
    fused_optimizer: str = setting("on", "one kernel instead of one for each of its operations", choices=ON_OFF)
    compile: str = setting("off", "torch.compile; it needs a compiler, which the image has not", choices=ON_OFF)
    bucket_mb: float | None = setting(
        None, "MB of gradients that DDP sends at once (default: DDP's own, 25 after a first 1)", above=0.0
    )
    static_graph: str = setting(
        "on", "DDP relies on the same graph in every step; off: weights may be left out", choices=ON_OFF
    )
    data_on_device: str = setting(
        "auto", "keep the data set on the GPU; auto: if it takes half the free memory or less", choices=AUTO_ON_OFF
    )
    num_workers: int | str | None = setting(
        None,
        "worker processes, one a GPU; 1:4 goes on with what is there, from 1 to 4, each step as if with 4 (default: "
        "the cluster's GPUs, or 2 on CPUs)",
        metavar="N|MIN:MAX",
        group="where",
    )
    device: str = setting("auto", "auto: cuda where the cluster has GPUs, else cpu", choices=DEVICES)
    storage_path: str = setting("results", "folder or s3://bucket/prefix that runs are kept under", metavar="PATH")
    run_name: str | None = setting(
        None, "folder of this run under the storage path; an unfinished run of this name is continued", metavar="NAME"
    )
    keep_checkpoints: int = setting(
        3, "checkpoints kept besides the best one", at_least=1, group="when something happens"
    )
    checkpoint_seconds: float = setting(
        300.0, "seconds after which a checkpoint is taken within an epoch; each epoch ends with one", at_least=0.0
    )
    max_stale: int = setting(3, "checkpoints in a row that may fail to be stored; one more ends the run", at_least=0)
    max_failures: int = setting(3, "crashes and stalls of workers after which training is resumed", at_least=0)
    max_preemptions: int = setting(
        10, "times that workers may be taken away, as by an update or an idle stop, and be waited for", at_least=0
    )
    stall_timeout: float = setting(
        600.0,
        "seconds without a step after which the workers' stacks are written down and training is resumed; it covers "
        "loading the data and compiling, too",
        above=0.0,
    )
    wait_seconds: float = setting(600.0, "how long to wait for the workers to join the cluster", at_least=0.0)
    cloudwatch_namespace: str | None = setting(
        None, "CloudWatch namespace that the run's progress is published to (default: none)", metavar="NAMESPACE"
    )

    def __post_init__(self) -> None:
        """Hold every value against the rules of its field."""
        for spec in fields(self):
            if (value := getattr(self, spec.name)) is not None:
                _check(spec, value)
        _check_norm_batch(self.norm_batch)
        _check_workers(self)
        _check_run_name(self.run_name)
        _check_namespace(self.cloudwatch_namespace)

    @property
    def workers(self) -> tuple[int, int] | None:
        """The fewest and the most workers that the run may have, or None where the cluster decides."""
        if self.num_workers is None:
            return None
        least, _, most = str(self.num_workers).partition(":")
        return int(least), int(most or least)

    def shares(self, world_size: int) -> int:
        """The parts of a step, of `batch_size` images each: as many as the run may have workers."""
        return self.workers[1] if self.workers else world_size

    @property
    def base_lr(self) -> float:
        """The peak learning rate at a global batch of 256: `lr`, or the optimizer's own."""
        return DEFAULT_LR[self.optimizer] if self.lr is None else self.lr

    @property
    def decay(self) -> float:
        """The decay of the weights: `weight_decay`, or the optimizer's own."""
        return DEFAULT_WEIGHT_DECAY[self.optimizer] if self.weight_decay is None else self.weight_decay

    def completed(self) -> "TrainingConfig":
        """This config with what it left open: the optimizer's own values, and a run name of its own."""
        model = re.sub(r"[^A-Za-z0-9]+", "-", self.model)
        unique = f"{model}-{self.dataset}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
        return replace(self, lr=self.base_lr, weight_decay=self.decay, run_name=self.run_name or unique)

    def to_dict(self) -> dict[str, Any]:
        """The settings as they are written to result.json."""
        return asdict(self)


def parse(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> TrainingConfig:
    """The config that a command line and the environment describe.

    Raises:
        UsageError: A value can't be read or breaks its rule.
    """
    return TrainingConfig(**vars(_parser(environment).parse_args(arguments)))


def flag(name: str) -> str:
    """The flag of a setting: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")


def environment_variable(name: str) -> str:
    """The environment variable of a setting: `batch_size` is `TRAINING_BATCH_SIZE`."""
    return ENVIRONMENT_PREFIX + name.upper()


class _Parser(argparse.ArgumentParser):
    """Raises one line instead of printing the usage of every flag."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; see python -m training --help")


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m training",
        description="Train an image classifier with PyTorch DDP on a Ray cluster, or on this machine.",
        epilog=textwrap.dedent(EPILOG),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    section: Any = parser
    for spec in fields(TrainingConfig):
        if title := spec.metadata.get("group"):
            section = parser.add_argument_group(title)
        default = environment.get(environment_variable(spec.name)) or spec.default
        section.add_argument(
            flag(spec.name), type=_type(spec), default=default, metavar=_metavar(spec), help=_help(spec, default)
        )
    return parser


def _type(spec: Field) -> Callable[[str], Any]:
    """`int` of a field annotated `int` or `int | None`."""
    return {"int": int, "float": float, "int | str": _number_or_text}.get(_type_name(spec), str)


def _number_or_text(value: str) -> int | str:
    return int(value) if value.isdecimal() else value


def _type_name(spec: Field) -> str:
    return str(getattr(spec.type, "__name__", spec.type)).removesuffix(" | None")


def _metavar(spec: Field) -> str:
    if choices := spec.metadata.get("choices"):
        return "{" + ",".join(choices) + "}"
    return spec.metadata.get("metavar", {"int": "N", "float": "X"}.get(_type_name(spec), "NAME"))


def _help(spec: Field, default: Any) -> str:
    shown = "" if default is None else f" (default: {default})"
    return (spec.metadata["description"] + shown).replace("%", "%%")


def _check(spec: Field, value: Any) -> None:
    rules = spec.metadata
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(spec, value, "a finite number")
    if "at_least" in rules and value < rules["at_least"]:
        _refuse(spec, value, f"{rules['at_least']} or more")
    if "at_most" in rules and value > rules["at_most"]:
        _refuse(spec, value, f"{rules['at_most']} or less")
    if "above" in rules and value <= rules["above"]:
        _refuse(spec, value, f"above {rules['above']:g}")
    if "choices" in rules and value not in rules["choices"]:
        _refuse(spec, value, f"one of {', '.join(rules['choices'])}")


def _refuse(spec: Field, value: Any, rule: str) -> NoReturn:
    raise UsageError(f"{flag(spec.name)}: {value!r} is not allowed; it must be {rule} ({spec.metadata['description']})")


def _check_norm_batch(images: int) -> None:
    if images == 1:
        raise UsageError("--norm-batch: 1 is not allowed; one image has no variance: use 2 or more, or 0 for none")


def _check_workers(config: TrainingConfig) -> None:
    given = config.num_workers
    if given is None:
        return
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", str(given)) or config.workers != tuple(sorted(config.workers or ())):
        raise UsageError(
            f"--num-workers: {given!r} is not allowed; it must be a number from 1, or the fewest and the most, as 1:4"
        )
    least, most = config.workers or (0, 0)
    if least < most and config.batch_size < config.norm_batch:
        raise UsageError(
            f"--num-workers: {given} may have fewer workers than {most}, and --norm-batch {config.norm_batch} takes "
            f"the images of several with --batch-size {config.batch_size}; use --norm-batch {config.batch_size} or less"
        )


def _check_run_name(name: str | None) -> None:
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise UsageError(
            f"--run-name: {name!r} is not allowed; it becomes a folder, so use letters, digits, '.', '_' and '-', "
            "up to 128, starting with a letter or digit"
        )


def _check_namespace(name: str | None) -> None:
    """CloudWatch's own rules: https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_PutMetricData.html."""
    if name is not None and not re.fullmatch(r"(?!AWS/|:| *$)[A-Za-z0-9._/#: -]{1,255}", name):
        raise UsageError(
            f"--cloudwatch-namespace: {name!r} is not allowed; use 1 to 255 letters, digits, '.', '-', '_', '/', '#', "
            "':' and spaces, not beginning with 'AWS/' or ':'"
        )
