"""What a preview of a stack that is up says about its runs.

It counts those that `pulumi destroy` would delete, since `destroy` itself does not run the program.
"""

from __future__ import annotations

import re

import pulumi
import pulumi_aws as aws

from ray_on_ecs.contract import RUNS_PREFIX

NAME = re.compile(r"[a-z0-9.-]+")
# Keys of one answer of S3.
MOST = 1000


def announce_update() -> None:
    """Say that an update waits for runs."""
    pulumi.log.info(
        "an update stops no run: ECS replaces a node once it is idle; ray-on-ecs stop --all ends what is under way"
    )


def announce_runs(bucket: pulumi.Output[str], opts: pulumi.InvokeOptions) -> None:
    """Say how many runs a bucket keeps; nothing if S3 may not be asked."""
    bucket.apply(lambda name: _announce(name, opts))


def _announce(bucket: str, opts: pulumi.InvokeOptions) -> None:
    if not NAME.fullmatch(bucket):  # a tool that plans without Pulumi's engine has a reference in its place
        return
    try:
        found = aws.s3.get_objects(bucket=bucket, prefix=f"{RUNS_PREFIX}/", delimiter="/", max_keys=MOST, opts=opts)
    except Exception:  # the engine's errors have no class in common; a preview needs no answer
        return
    names = [prefix.removeprefix(f"{RUNS_PREFIX}/") for prefix in found.common_prefixes]
    if number := sum(not name.startswith(".") for name in names):
        at_least = "at least " if len(names) == MOST else ""
        runs = "1 run" if number == 1 else f"{at_least}{number} runs"
        pulumi.log.info(
            f"{bucket} keeps {runs}: pulumi destroy deletes them, unless pulumi config set retainBucket true and "
            "pulumi up come first"
        )
