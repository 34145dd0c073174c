"""Identity checks of a deployed stack: account, region, roles and state."""

from __future__ import annotations

from typing import Any

import pulumi
import pytest

from infra.cluster import Cluster, ClusterArgs
from infra.config.identity import check_roles, check_state, identity
from infra.config.location import Caller, ask_caller, check_account, locate, remember
from infra.config.settings import Settings
from infra.errors import SettingError
from tests.infra.fake_aws import ACCOUNT, CLUSTER, Cloud, head_role, security_group

OTHER = "999999999999"
BOUNDARY = f"arn:aws:iam::{ACCOUNT}:policy/boundary"


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


def roles(cloud: Cloud, **settings: Any) -> None:
    """The check of the roles, with otherwise default settings."""
    cloud.run(lambda: check_roles(Settings(**settings), ask_caller(), CLUSTER))


def test_the_roles_of_this_stack_pass(cloud: Cloud, warnings: list[str]) -> None:
    cloud.roles = [head_role(path="/teams/ml/", permissionsBoundary=BOUNDARY)]
    roles(cloud, role_path="/teams/ml/", permissions_boundary=BOUNDARY)
    assert warnings == []


def test_another_region_is_refused(cloud: Cloud) -> None:
    cloud.roles = [head_role(region="eu-west-1")]
    with pytest.raises(pulumi.RunError) as refused:
        roles(cloud)
    assert str(refused.value) == (
        "aws:region: 'us-west-2', but this stack is up in eu-west-1; `pulumi config set aws:region eu-west-1`, "
        "`pulumi destroy` it there first, or rename this stack"
    )


@pytest.mark.parametrize(
    "other",
    [
        head_role(region="eu-west-1", stack="prod"),
        head_role(region="eu-west-1", project="theirs"),
        {**head_role(region="eu-west-1"), "name": "my-ray-on-ecs-head-instance-role-1a2b3c4"},
        {**head_role(region="eu-west-1"), "tags": {}},
    ],
    ids=["another stack", "another project", "another cluster", "no tags"],
)
def test_other_stacks_roles_do_not_count(cloud: Cloud, other: dict[str, Any]) -> None:
    cloud.roles = [other]
    roles(cloud)


@pytest.mark.parametrize(
    ("role", "settings", "line"),
    [
        ({}, {"role_path": "/teams/ml/"}, "rolePath: '/teams/ml/' differs from the stack's, /; change it back, or"),
        ({"path": "/teams/ml/"}, {}, "rolePath: '/' differs from the stack's, /teams/ml/; change it back, or"),
        ({}, {"permissions_boundary": BOUNDARY}, f"permissionsBoundary: '{BOUNDARY}' differs from the stack's, none; "),
        ({"permissionsBoundary": BOUNDARY}, {}, f"permissionsBoundary: '' differs from the stack's, {BOUNDARY}; "),
    ],
)
def test_roles_in_use_keep_their_path_and_boundary(
    cloud: Cloud, role: dict[str, Any], settings: dict[str, Any], line: str
) -> None:
    cloud.roles = [head_role(**role)]
    with pytest.raises(SettingError) as refused:
        roles(cloud, **settings)
    assert str(refused.value).startswith(line)


def test_a_caller_without_iam_rights_is_warned(cloud: Cloud, warnings: list[str]) -> None:
    cloud.silent = ("getRoles",)
    roles(cloud)
    assert "(iam:ListRoles and iam:GetRole: " in warnings[0]
    assert warnings[0].endswith("; continuing")


def state(cloud: Cloud, **settings: Any) -> str | None:
    """The cluster's name as the security group's tag gets it; a preview of a new stack does not know it."""

    def program() -> pulumi.Output[str]:
        up, others = remember(CLUSTER)
        current = Settings(**settings)
        now = identity(current, locate(current, ask_caller(), up, None, others), None)
        cluster = Cluster(f"{CLUSTER}-ray", ClusterArgs(made_for=now, log_retention_days=30))
        return check_state(cluster.name, cluster.made_for, now, up)

    return cloud.value(cloud.run(program))


def test_the_state_that_has_the_stack_passes(cloud: Cloud) -> None:
    assert state(Cloud()) == "ray-on-ecs-ray-dev-c0ffee"
    cloud.security_groups = [security_group()]
    assert state(cloud) == "ray-on-ecs-ray-dev-c0ffee"


@pytest.mark.parametrize("change", [{"stack": "prod"}, {"project": "vision"}])
def test_a_renamed_stack_passes(change: dict[str, Any]) -> None:
    zones: dict[str, Any] = {"zone": "us-west-2a", "zones": "us-west-2a us-west-2c"}
    cloud = Cloud(**change, security_groups=[security_group(**zones)], kept={"zones": zones["zones"]})
    assert state(cloud) == "ray-on-ecs-ray-dev-c0ffee"


@pytest.mark.parametrize(("preview", "cluster"), [(True, "ray-on-ecs-ray-dev-c0ffee"), (False, "ray-of-another")])
def test_another_state_is_refused(preview: bool, cluster: str) -> None:
    cloud = Cloud(security_groups=[security_group(cluster=cluster)], preview=preview)
    with pytest.raises(pulumi.RunError) as refused:
        state(cloud)
    assert str(refused.value).startswith(
        "stack: a stack named dev is up in this account and region, but not in this state (cluster "
        f"{cluster}, security group sg-of-vpc-0a1b); use the state that created it (`pulumi login`), "
    )


@pytest.mark.parametrize(
    ("kept", "line"),
    [
        ({"account": OTHER}, f"aws:allowedAccountIds: the stack is in account {OTHER}, and these credentials are of"),
        ({"region": "eu-west-1"}, "aws:region: 'us-west-2', but this stack is up in eu-west-1; "),
        (
            {"rolePath": "/teams/"},
            "rolePath: '/' differs from the stack's, /teams/; change it back, or `pulumi destroy`",
        ),
        ({"permissionsBoundary": BOUNDARY}, "permissionsBoundary: '' differs from the stack's, arn:aws:iam::"),
        ({"vpcId": "vpc-0b"}, "vpcId: '' differs from the stack's network, vpc-0b; change it back, or"),
        (
            {"bucketName": "company-runs"},
            "bucketName: '' differs from the stack's bucket, company-runs; change it back, or copy the runs",
        ),
        ({"vpcCidr": "10.1.0.0/16"}, "vpcCidr: '10.0.0.0/16' differs from the stack's network, 10.1.0.0/16; "),
        (
            {"zones": "us-west-2c us-west-2b"},
            "availabilityZones: the stack has subnets in us-west-2c us-west-2b, in this",
        ),
    ],
)
@pytest.mark.parametrize("stack", ["dev", "prod"], ids=["same name", "renamed"])
def test_a_stack_stays_in_place(stack: str, kept: dict[str, str], line: str) -> None:
    with pytest.raises(pulumi.RunError) as refused:
        state(Cloud(stack=stack, kept=kept))
    assert str(refused.value).startswith(line)
