"""Preview messages about the runs of a stack."""

import pulumi
import pytest

from infra.config import runs
from tests.infra.fake_aws import Cloud


def announced(cloud: Cloud, *, preview: bool = True) -> list[str]:
    cloud.preview = preview
    cloud.run(lambda: runs.announce_runs(pulumi.Output.from_input("training-bucket"), pulumi.InvokeOptions()))
    return cloud.messages


@pytest.mark.parametrize(
    ("names", "number"),
    [
        (("first",), "1 run"),
        (("first", "second", ".code"), "2 runs"),
        (tuple(map(str, range(1000))), "at least 1000 runs"),
    ],
    ids=["one", "two and the code", "a whole answer"],
)
def test_runs_that_destroy_deletes_are_counted(cloud: Cloud, names: tuple[str, ...], number: str) -> None:
    cloud.runs = names
    assert announced(cloud) == [
        f"training-bucket contains {number}, which `pulumi destroy` deletes; to keep them, run `pulumi config set "
        "retainBucket true` and `pulumi up` first"
    ]


def test_an_update_does_not_count(cloud: Cloud) -> None:
    cloud.runs = ("first",)
    assert not announced(cloud, preview=False)


def test_an_empty_bucket_is_not_mentioned(cloud: Cloud) -> None:
    assert not announced(cloud)


def test_preview_tolerates_an_unlistable_bucket(cloud: Cloud) -> None:
    cloud.silent = ("getObjects",)
    assert not announced(cloud)
