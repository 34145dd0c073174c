"""Options, workers and folder of a program on Ray Train, under `ray-on-ecs run` as well as by `python`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_on_ecs.recipes.options import Options, fail, whole


def add_options(parser: Options) -> Options:
    """Add BUCKET, --name, --num-workers and --use-gpu; under `ray-on-ecs run` the first two are the run's."""
    add = parser.add_argument
    add("storage", nargs="?", type=storage_path, metavar="BUCKET", help="without a run: bucket, s3://… or ./folder")
    add("--name", type=run_name, help="name of the folder in BUCKET; with the same one the training resumes")
    add("--num-workers", type=whole(), metavar="N", help="by default one for each GPU, or two on CPUs")
    add("--use-gpu", action=argparse.BooleanOptionalAction, help="by default if the cluster has GPUs")
    return parser


def for_workers(source: str) -> str:
    """Return a data set's folder as an absolute path, since Ray starts the workers in another folder.

    Those of a run have a copy of the working directory, in which a relative path is right.
    """
    is_folder = "://" not in source and "RUN_URI" not in os.environ and Path(source).is_dir()
    return str(Path(source).absolute()) if is_folder else source


def storage_path(text: str) -> str:
    """Return a bucket's name, s3://bucket/prefix or a folder, which has a slash or exists, as Ray's storage path.

    It is a type for an option: a bucket that does not exist is an error of one line.
    """
    if "://" not in text:
        folder = Path(text).expanduser()
        if text.startswith((".", "/", "~")) or folder.is_dir():
            return str(folder.absolute())
        if "/" in text:
            raise argparse.ArgumentTypeError(f"{text!r}: write s3://{text} or ./{text}")
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", text):
            raise argparse.ArgumentTypeError(f"{text!r} is neither a bucket nor a folder; write a folder as ./{text}")
        text = f"s3://{text}"

    from pyarrow.fs import FileSystem, FileType

    try:
        filesystem, path = FileSystem.from_uri(text)
        exists = filesystem.get_file_info(path.partition("/")[0]).type is not FileType.NotFound
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {str(error).splitlines()[0]}") from None
    except OSError as error:  # a network may be better at the next attempt
        fail(f"{text}: {str(error).splitlines()[0]}", status=1)
    if not exists and text.startswith("s3://"):
        raise argparse.ArgumentTypeError(f"{text}: this bucket does not exist")
    return text.rstrip("/")


def run_name(text: str) -> str:
    """Return the name of a run, which is that of a folder: it is a type for an option."""
    if not re.fullmatch(r"\w[\w.-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not of letters, digits, dots, dashes and underscores")
    return text


def choose_workers(
    resources: Mapping[str, float], num_workers: int | None, use_gpu: bool | None, *, on_cpus: int = 2
) -> dict[str, Any]:
    """Return `num_workers` and `use_gpu` of Ray Train's ScalingConfig, for `ray.cluster_resources()`.

    By default a worker for each GPU: on a stack as many as a script would get, which start for the program, elsewhere
    those that the cluster has. Without GPUs, or with `--device cpu`, `on_cpus` workers, or as many as there are CPUs if
    these are fewer; a stack without any starts some.
    """
    cpus, gpus = (int(resources.get(kind, 0)) for kind in ("CPU", "GPU"))
    stack_gpus = os.environ.get("STACK_GPUS", "")
    gpus = int(stack_gpus or (0 if sys.platform == "darwin" else gpus))  # Ray counts Apple's, not for Ray Train
    use_gpu = gpus > 0 if use_gpu is None else use_gpu
    number = num_workers or (gpus if use_gpu else min(on_cpus, cpus) or (on_cpus if stack_gpus else 0))
    if not number:
        fail("the cluster has no workers at the moment; --num-workers N waits for them", status=1)
    return {"num_workers": number, "use_gpu": use_gpu}


def export_last_and_best(result: Any, metric: str) -> None:
    """Export the last checkpoint's weights as `model.safetensors`, and those with the greatest metric as `best`."""
    if result.checkpoint:
        export(result, result.checkpoint, "model.safetensors")
        export(result, result.get_best_checkpoint(metric, "max"), "best.safetensors")


def export(result: Any, checkpoint: Any, name: str) -> None:
    """Copy `model.safetensors` of a checkpoint of Ray Train under this name into the folder of the run.

    Without a run it is the folder of the result, in the storage path. Nothing is copied without a checkpoint.
    """
    if checkpoint is None:
        return
    from pyarrow.fs import FileSystem, copy_files

    uri = os.environ.get("RUN_URI")
    filesystem, folder = FileSystem.from_uri(uri) if uri else (result.filesystem, result.path)
    copy_files(f"{checkpoint.path}/model.safetensors", f"{folder}/{name}", checkpoint.filesystem, filesystem)
    print(f"{name}: the weights of {checkpoint.path}", flush=True)
