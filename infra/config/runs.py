"""Number of runs in the bucket, for a preview: `pulumi destroy` deletes them, and does not run the program."""

from __future__ import annotations

import re

import pulumi
import pulumi_aws as aws

from ray_on_ecs.contract import RUNS_PREFIX

NAME = re.compile(r"[a-z0-9.-]+")
# S3's maximum per ListObjectsV2 call.
MAX_KEYS = 1000


def announce_runs(bucket: pulumi.Output[str], opts: pulumi.InvokeOptions) -> None:
    """Log the number of runs in a bucket that exists, unless S3 denies access."""

    def announce(name: str) -> None:
        if not NAME.fullmatch(name):  # a planner without Pulumi's engine has a reference instead of a name
            return
        try:
            page = aws.s3.get_objects(
                bucket=name, prefix=f"{RUNS_PREFIX}/", delimiter="/", max_keys=MAX_KEYS, opts=opts
            )
        except Exception:  # the engine's errors share no class, and the count is optional
            return
        names = [prefix.removeprefix(f"{RUNS_PREFIX}/") for prefix in page.common_prefixes]
        if number := sum(not name.startswith(".") for name in names):
            at_least = "at least " if len(names) == MAX_KEYS else ""
            runs = "1 run" if number == 1 else f"{at_least}{number} runs"
            pulumi.log.info(
                f"{name} contains {runs}, which `pulumi destroy` deletes; to keep them, run `pulumi config set "
                "retainBucket true` and `pulumi up` first"
            )

    if pulumi.runtime.is_dry_run():
        bucket.apply(announce)
