"""Identity checks of a cluster that is up: account, region, and fields that can't change."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pulumi
import pytest

from infra.choices import Choices, ChoicesArgs
from infra.config import RayClusterArgs
from infra.config.identity import check_identity, check_new, identity_of
from infra.config.location import Caller, ask_caller, check_account, locate
from infra.config.plan import make_plan
from infra.errors import SettingError
from tests.infra.fake_aws import ACCOUNT, CLUSTER, Cloud, group_tags

OTHER = "999999999999"


def account(cloud: Cloud) -> Caller:
    """The caller, whose account has passed the check."""

    def program() -> Caller:
        caller = ask_caller()
        check_account(caller.account)
        return caller

    return cloud.run(program)


def test_the_account_of_the_configuration_passes(cloud: Cloud, warnings: list[str]) -> None:
    assert account(cloud).account == ACCOUNT
    assert warnings == []


def test_another_account_is_refused(cloud: Cloud) -> None:
    cloud.account = OTHER
    with pytest.raises(pulumi.RunError) as refused:
        account(cloud)
    assert str(refused.value) == (
        f"aws:allowedAccountIds: the stack is in account {ACCOUNT}, and these credentials are of {OTHER}; choose "
        "others with AWS_PROFILE or `pulumi config set aws:profile NAME`"
    )


def test_the_providers_own_refusal_is_one_line(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = ("", f"AWS account ID not allowed: {OTHER}")
    monkeypatch.setattr(Cloud, "call", lambda self, args: ({}, [failure]))
    with pytest.raises(pulumi.RunError, match=rf"^aws:allowedAccountIds: .* these credentials are of {OTHER}; "):
        account(cloud)


def test_account_ids_may_be_numbers(cloud: Cloud) -> None:
    cloud.account, cloud.config = "000000000042", {"aws:allowedAccountIds": "[42, 123456789012]"}
    assert account(cloud).account == "000000000042"


@pytest.mark.parametrize("text", ["123456789012", "012345678901", "my-account"])
def test_a_list_of_accounts_is_a_list(cloud: Cloud, text: str) -> None:
    cloud.config = {"aws:allowedAccountIds": text}
    with pytest.raises(pulumi.RunError) as refused:
        account(cloud)
    assert str(refused.value) == (
        f"aws:allowedAccountIds: {text} is not a list; `pulumi config rm aws:allowedAccountIds`, then `pulumi config "
        f"set --path 'aws:allowedAccountIds[0]' {text}`"
    )


def test_a_missing_account_is_a_warning(cloud: Cloud, warnings: list[str]) -> None:
    cloud.config = {"aws:allowedAccountIds": "[]"}
    account(cloud)
    [line] = warnings
    assert line.endswith(f"Set it: `pulumi config set --path 'aws:allowedAccountIds[0]' {ACCOUNT}`")


NAME = "ray-on-ecs-ray-dev-c0ffee"


def name_of(
    cloud: Cloud,
    image_problem: SettingError | None = None,
    network_problem: SettingError | None = None,
    ended: Sequence[SettingError] = (),
    builder: str = "local",
    **fields: Any,
) -> str | None:
    """Name of the cluster after the check; a preview of a new cluster does not know it."""

    def program() -> pulumi.Output[str]:
        args = RayClusterArgs(**fields)
        plan: Any = SimpleNamespace(
            image_problem=image_problem,
            network_problem=network_problem,
            ended=ended,
            image_builder=builder,
            location=locate(args, ask_caller(), None),
        )
        identity = identity_of(args, plan)
        choices = Choices("choices", ChoicesArgs(name=f"{CLUSTER}-ray", zones=["us-west-2a"], identity=identity))
        check_new(choices.cluster_name, plan, CLUSTER, pulumi.InvokeOptions(parent=choices))
        return check_identity(choices.cluster_name, choices.identity, args, plan)

    return cloud.value(cloud.run(program))


@pytest.mark.parametrize("change", [{}, {"stack": "prod"}, {"project": "vision"}])
def test_an_unchanged_cluster_passes(change: dict[str, Any]) -> None:
    assert name_of(Cloud(**change)) == NAME


@pytest.mark.parametrize(
    ("kept", "line"),
    [
        ({"account": OTHER}, f"aws:allowedAccountIds: the stack is in account {OTHER}, and these credentials are of"),
        ({"region": "eu-west-1"}, "aws:region: 'us-west-2', but this stack is up in eu-west-1; `pulumi config set"),
        ({"role_path": "/teams/"}, "role_path: '/' differs from the cluster's, /teams/; change it back, or `pulumi"),
        ({"vpc_id": "vpc-0b"}, "vpc_id: '' differs from the cluster's, vpc-0b; change it back, or `pulumi destroy`"),
        ({"bucket_name": "runs"}, "bucket_name: '' differs from the cluster's, runs; change it back, or copy the runs"),
        ({"vpc_cidr": "10.1.0.0/16"}, "vpc_cidr: '10.0.0.0/16' differs from the cluster's, 10.1.0.0/16; change"),
    ],
)
@pytest.mark.parametrize("stack", ["dev", "prod"], ids=["same name", "renamed"])
def test_a_cluster_keeps_its_identity(stack: str, kept: dict[str, str], line: str) -> None:
    with pytest.raises(pulumi.RunError) as refused:
        name_of(Cloud(stack=stack, kept=kept))
    assert str(refused.value).startswith(line)


NO_DOCKER = SettingError("image_build", "local", "needs Docker on this machine, but it is not installed", "start it")


@pytest.mark.parametrize("image_uri", ["", "public.example/ray@sha256:" + 64 * "a"], ids=["built", "ready"])
@pytest.mark.parametrize(("problem", "found"), [(None, "local"), (NO_DOCKER, "codebuild")], ids=["Docker", "none"])
@pytest.mark.parametrize("image_build", ["auto", "local", "codebuild"])
@pytest.mark.parametrize("kept", [None, "", "local", "codebuild"], ids=["unknown", "was ready", "local", "codebuild"])
def test_auto_does_not_replace_an_image_of_codebuild(
    kept: str | None, image_build: str, problem: SettingError | None, found: str, image_uri: str
) -> None:
    cloud = Cloud(preview=True, is_up=True, kept={"image_builder": kept}, image_problem=problem)

    def program() -> pulumi.Output[str]:
        args = RayClusterArgs(image_build=image_build, image_uri=image_uri)
        plan = make_plan(args, CLUSTER)
        identity = identity_of(args, plan)
        choices = Choices("choices", ChoicesArgs(name=f"{CLUSTER}-ray", zones=["us-west-2a"], identity=identity))
        return check_identity(choices.cluster_name, choices.identity, args, plan)

    if image_build != "auto" or image_uri or (kept, found) != ("codebuild", "local"):
        assert cloud.value(cloud.run(program)) == NAME
        return
    with pytest.raises(pulumi.RunError) as refused:
        cloud.run(program)
    assert str(refused.value) == (
        "image_build: 'auto' is local on this machine, but was codebuild at the first `pulumi up`; set image_build to "
        "codebuild for everyone who updates the stack, or to local, which replaces all nodes"
    )


def test_outputs_are_not_compared() -> None:
    later = pulumi.Output.from_input("company-runs")
    assert name_of(Cloud(kept={"bucket_name": "other"}), bucket_name=later) == NAME


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ((group_tags(),), True),
        ((group_tags(stack="prod"), group_tags("vision"), group_tags(project="theirs")), False),
        ((), False),
    ],
    ids=["of another state", "other clusters", "none"],
)
def test_a_preview_names_the_cluster_of_another_state(
    warnings: list[str], groups: tuple[dict[str, str], ...], told: bool
) -> None:
    assert name_of(Cloud(preview=True, security_groups=groups)) is None
    assert [line.partition(";")[0] for line in warnings] == told * [
        "stack: a cluster of this name is up in this account and region, but not in this state (security group sg-0)"
    ]


def test_an_update_creates_it_without_a_question(warnings: list[str]) -> None:
    cloud = Cloud(security_groups=(group_tags(),))
    assert name_of(cloud) == NAME
    assert not warnings


IMAGE = SettingError("image_uri", "", "is empty, and Docker is not installed", "start it")
NETWORK = SettingError("vpc_id", "", "is empty, and the quota is full", "delete one")


@pytest.mark.parametrize("problem", [{"image_problem": IMAGE}, {"network_problem": NETWORK}], ids=["image", "network"])
def test_only_a_preview_of_a_new_cluster_refuses_what_only_that_needs(
    warnings: list[str], problem: dict[str, Any]
) -> None:
    [error] = problem.values()
    with pytest.raises(SettingError) as refused:
        name_of(Cloud(preview=True), **problem)
    assert refused.value is error
    expected = [f"{IMAGE} (this machine could not build a changed image)"] if error is IMAGE else []
    for cloud in (Cloud(preview=True, is_up=True), Cloud()):
        assert name_of(cloud, **problem) == NAME
        assert warnings == expected
        warnings.clear()


def test_ended_reservation_is_refused_only_in_a_new_cluster(warnings: list[str]) -> None:
    ended = [SettingError(f"worker_pools.{pool}.capacity_reservation_id", "cr-1", "is expired", "go") for pool in "ab"]
    with pytest.raises(SettingError) as refused:
        name_of(Cloud(preview=True), ended=ended)
    assert refused.value is ended[0]
    for cloud in (Cloud(preview=True, is_up=True), Cloud()):
        assert name_of(cloud, ended=ended) == NAME
        assert warnings == [str(error) for error in ended]
        warnings.clear()


def test_a_second_stack_of_the_project_is_new() -> None:
    """The clusters of other stacks in the account say nothing about this one."""
    cloud = Cloud(preview=True, stack="prod", security_groups=(group_tags(stack="dev"),))
    with pytest.raises(SettingError):
        name_of(cloud, network_problem=NETWORK)


def test_the_question_goes_to_the_same_provider(warnings: list[str]) -> None:
    cloud = Cloud(preview=True, security_groups=(group_tags(),))
    name_of(cloud)
    assert len(cloud.providers) == 1


def test_a_denied_question_is_no_obstacle(warnings: list[str]) -> None:
    assert name_of(Cloud(preview=True, silent=("getSecurityGroups",))) is None
    assert not warnings
