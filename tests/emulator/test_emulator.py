"""The emulator's parts that need neither Terraform nor AWS."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pulumi
import pulumi_aws as aws
import pulumi_random as random
import pytest

from tests.emulator import chance
from tests.emulator.monitor import Monitor, Plan
from tests.emulator.options import Step, options, steps
from tests.emulator.program import Program
from tests.emulator.schema import arguments, properties, terraform_type
from tests.emulator.stack import Stack, kinds
from tests.emulator.terraform import TEMPLATE, Terraform, is_reference, warnings

TEXT = {"type": "string", "optional": True}
TEXTS = {"type": ["list", "string"], "optional": True}
ID = {"type": "string", "computed": True}


def resource(**attributes: Any) -> dict[str, Any]:
    return {"block": {"attributes": {"id": ID, **attributes}}}


SCHEMA = {
    "resource_schemas": {
        "aws_vpc": resource(cidr_block=TEXT, arn=ID),
        "aws_subnet": resource(vpc_id=TEXT, availability_zone=TEXT),
        "aws_ecs_cluster": resource(name=TEXT),
        "aws_iam_role": resource(name=TEXT, assume_role_policy=TEXT),
        "aws_s3_bucket": resource(bucket=TEXT),
        "aws_vpc_endpoint": resource(vpc_id=TEXT, service_name=TEXT, route_table_ids=TEXTS, subnet_ids=TEXTS),
        "aws_service_discovery_service": resource(name=TEXT),
        "aws_vpc_security_group_ingress_rule": resource(),
    },
    "data_source_schemas": {
        "aws_instances": resource(ids=TEXTS, instance_tags={"type": ["map", "string"], "optional": True}),
        "aws_ec2_instance_type": resource(),
    },
}
RULE = {
    "attributes": {"port": TEXT, "cidr_blocks": TEXTS, "arn": ID},
    "block_types": {"tag_specification": {"block": {"attributes": {"resource_type": TEXT}}}},
}
# Never closed, as in tests/infra/fake_aws.py.
LOOP = asyncio.new_event_loop()


def recorded(program: Any, plan: Plan | None = None) -> Plan:
    """The plan of a program that registers resources."""
    plan = plan or Plan()
    asyncio.set_event_loop(LOOP)
    monitor = Monitor(plan, SCHEMA, Terraform(Path(), "us-west-2"), "first", LOOP)
    pulumi.runtime.settings.ROOT.set(None)  # of an earlier program
    pulumi.runtime.set_mocks(monitor, project="p", stack="s", preview=False, monitor=monitor)
    pulumi.runtime.test(program)()
    return plan


def test_steps_in_the_order_of_the_command_line() -> None:
    line = "--refused no --then zones=a,b,spot=true --alarm idle --state lost --state copy,stack=prod --refused taken"
    assert steps(options().parse_args(line.split()).steps) == [
        Step(refused="no"),
        Step({"zones": "a,b", "spot": "true"}),
        Step(alarm="idle"),
        Step(state="lost"),
        Step({"stack": "prod"}, state="copy", refused="taken"),
    ]


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("aws:ec2/vpc:Vpc", "aws_vpc"),
        ("aws:ecs/cluster:Cluster", "aws_ecs_cluster"),
        ("aws:servicediscovery/service:Service", "aws_service_discovery_service"),
        ("aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule", "aws_vpc_security_group_ingress_rule"),
        ("aws:ec2/getInstanceType:getInstanceType", "aws_ec2_instance_type"),
        ("aws:ec2/getInstances:getInstances", "aws_instances"),
        ("aws:ec2/unknown:Unknown", None),
    ],
)
def test_terraform_type_of_token(token: str, expected: str | None) -> None:
    assert terraform_type(token, SCHEMA["resource_schemas"] | SCHEMA["data_source_schemas"]) == expected


def test_arguments_in_the_providers_form() -> None:
    problems: list[str] = []
    inputs = {
        "port": "1",
        "cidrBlocks": ["10.0.0.0/8"],
        "tagSpecifications": [{"resourceType": "instance"}],
        "arn": "x",
    }
    converted = arguments(RULE, "rule", {**inputs, "colour": "red", "region": "r", "absent": None}, problems, "rule")
    assert converted["tag_specification"] == [{"resource_type": "instance"}]
    assert converted["cidr_blocks"] == ["10.0.0.0/8"]
    assert problems == ["rule.arn: read-only", "rule.colour: not an argument of the provider"]


def test_properties_in_pulumis_form() -> None:
    fields = {"gpus": {"type": ["list", ["object", {"memory_size": "number"}]]}, "ebs": {"type": ["map", "string"]}}
    attributes = properties({"attributes": fields}, {"gpus": [{"memory_size": 1}], "ebs": {"volume_size": "30"}})
    assert attributes["gpuses"] == [{"memorySize": 1}]
    assert attributes["ebs"] == {"volume_size": "30"}


def test_text_is_no_template() -> None:
    text = json.dumps("echo ${HOME} %{x} ${aws_vpc.main.id} ${data.aws_instances.source_0.ids[0]}")
    assert "echo $${HOME} %%{x} ${aws_vpc" in TEMPLATE.sub(r"\1\1{", text)
    assert "} ${data.aws" in TEMPLATE.sub(r"\1\1{", text)
    assert not is_reference({"user_data": "${HOME}"})


def test_warnings_of_provider() -> None:
    text = "╷\n│ Warning: Argument is deprecated\n│\n╵\n╷\n│ Warning: Slow\n│\n│   with aws_x.y\n╵\n"
    assert warnings(text) == ["Slow with aws_x.y"]


def test_references_order_and_names() -> None:
    def program() -> None:
        vpc = aws.ec2.Vpc("main", cidr_block="10.0.0.0/16")
        aws.ec2.Subnet("private", vpc_id=vpc.id, opts=pulumi.ResourceOptions(ignore_changes=["availabilityZone"]))
        role = aws.iam.Role("node", assume_role_policy="{}", opts=pulumi.ResourceOptions(depends_on=[vpc]))
        aws.ecs.Cluster("ray", name=role.name, opts=pulumi.ResourceOptions(retain_on_delete=True))

    plan = recorded(program)
    assert plan.resources["aws_subnet"]["private"] == {
        "vpc_id": "${aws_vpc.main.id}",
        "lifecycle": {"ignore_changes": ["availability_zone"]},
    }
    assert plan.resources["aws_iam_role"]["node"]["depends_on"] == ["aws_vpc.main"]
    assert plan.resources["aws_ecs_cluster"]["ray"] == {"name": "${aws_iam_role.node.name}"}
    assert plan.names == {"aws_iam_role.node": ("name", "node")}
    assert plan.deleted_first == {"aws_ecs_cluster.ray"}
    assert plan.retained == {"aws_ecs_cluster.ray"}
    assert plan.problems == []


def test_question_about_resource_is_asked_later() -> None:
    answers = []

    def program() -> None:
        vpc = aws.ec2.Vpc("main", cidr_block="10.0.0.0/16")
        aws.ec2.get_instances_output(instance_tags=vpc.id.apply(lambda vpc_id: {"vpc": vpc_id})).ids.apply(
            answers.append
        )

    plan = recorded(program)
    assert plan.sources["aws_instances"]["source_0"]["depends_on"] == ["aws_vpc.main"]
    assert answers == [["${data.aws_instances.source_0.ids[0]}"]]


def test_faults_that_the_provider_does_not_see() -> None:
    def program() -> None:
        for _ in range(2):
            aws.ec2.Vpc("main", cidr_block="10.0.0.0/16")
        aws.ec2.VpcEndpoint("s3", vpc_id="vpc-1", service_name="s3")

    of_engine, *others = sorted(recorded(program).problems, key=lambda problem: "URN" not in problem)
    assert "Duplicate resource URN" in of_engine
    # Resources are registered in parallel.
    assert sorted(others) == [
        "aws_vpc.main: another resource has this name",
        "aws_vpc_endpoint.s3: a gateway endpoint without a route table, which nothing reaches",
    ]


def test_random_resource_in_program() -> None:
    def program(prefix: str) -> list[str]:
        results: list[str] = []
        opts = pulumi.ResourceOptions(ignore_changes=["prefix", "keepers"])
        random.RandomId("name", byte_length=3, prefix=prefix, opts=opts).hex.apply(results.append)
        return results

    kept: list[Any] = []
    plan = recorded(lambda: kept.append(program("dev-")))
    recorded(lambda: kept.append(program("prod-")), Plan(kept=plan.kept))
    [[first], [second]] = kept
    assert first == second
    assert first.startswith("dev-")


@pytest.mark.parametrize(
    ("changed", "ignored", "stays"),
    [
        ({}, [], True),
        ({"prefix": "prod-"}, ["prefix", "keepers"], True),
        ({"keepers": {"by": "hand"}}, ["keepers"], True),
        ({"prefix": "prod-"}, [], False),
        ({"prefix": "prod-", "byteLength": 4}, ["prefix"], False),
    ],
)
def test_random_result_is_kept(changed: dict[str, Any], ignored: list[str], stays: bool) -> None:
    kept: chance.Kept = {}
    token = "random:index/randomId:RandomId"
    inputs = {"byteLength": 3, "prefix": "dev-"}
    before = chance.keep(kept, "first", token, "name", inputs, ignored)
    after = chance.keep(kept, "first", token, "name", {**inputs, **changed}, ignored)
    assert (after["hex"] == before["hex"]) == stays


def test_configuration_of_a_renamed_stack(tmp_path: Path) -> None:
    (tmp_path / "Pulumi.yaml").write_text("name: p\nconfig: {size: {default: 1}, zones: {default: a}}")
    (tmp_path / "Pulumi.dev.yaml").write_text("config: {size: 2, aws:profile: me}")
    program = Program(tmp_path, "first", "dev", {}, "us-west-2").changed({"p:size": "3"})
    renamed = program.changed({"stack": "prod", "zones": "b"}).changed({"size": "4"})
    assert renamed.stack == "prod"
    account = {"aws:region": "us-west-2", "aws:profile": "me", "aws:allowedAccountIds": '["123456789012"]'}
    assert renamed.configuration() == {"p:size": "4", "p:zones": "b", **account}


def test_states_have_their_own_chance(tmp_path: Path) -> None:
    stacks = [Stack(tmp_path, Program(tmp_path, state, "dev", {}, "us-west-2")) for state in ("first", "second")]
    assert len({stack.physical_name("aws_iam_role.node", "node") for stack in stacks}) == 2
    assert len({chance.draw("RandomId", {"byteLength": 4}, state)["hex"] for state in ("first", "second")}) == 2


def change(address: str, actions: list[str], before: Any = None, after: Any = None) -> dict[str, Any]:
    return {"address": address, "mode": "managed", "change": {"actions": actions, "before": before, "after": after}}


def test_replacement_that_the_program_asks_for() -> None:
    planned = [
        change("aws_launch_template.a", ["update"], {"instance_type": "x"}, {"instance_type": "y"}),
        change("aws_launch_template.b", ["update"], {"instance_type": "x"}, {"instance_type": "x"}),
        change("aws_iam_role.c", ["delete", "create"]),
        change("aws_iam_role.d", ["no-op"]),
    ]
    asked = {f"aws_launch_template.{key}": ["instance_type"] for key in "ab"}
    assert kinds({"resource_changes": planned}, asked) == {
        "force": ["aws_launch_template.a"],
        "replace": ["aws_launch_template.a", "aws_iam_role.c"],
        "update": ["aws_launch_template.b"],
    }


def test_replacement_comes_first_under_another_name(tmp_path: Path) -> None:
    stack = Stack(tmp_path, Program(tmp_path, "first", "dev", {}, "us-west-2"))
    plan = Plan(
        resources={"aws_iam_role": {"a": {}, "b": {"name": "given"}}, "aws_route": {"c": {}}},
        names={"aws_iam_role.a": ("name", "a")},
        deleted_first={"aws_iam_role.b"},
    )
    before = stack.resources(plan)["aws_iam_role"]["a"]["name"]
    replaced = {"aws_iam_role.a", "aws_iam_role.b", "aws_route.c"}
    stack.generations.update(replaced)
    after = stack.resources(plan, replaced)
    assert after["aws_iam_role"]["a"]["name"] != before
    assert after["aws_iam_role"]["a"]["lifecycle"] == {"create_before_destroy": True}
    assert after["aws_iam_role"]["b"] == {"name": "given"}
    assert after["aws_route"]["c"] == {}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--config", "workerCount"], "argument --config: 'workerCount' is not KEY=VALUE"),
        (["--config", "=3"], "argument --config: '=3' is not KEY=VALUE"),
        (["--config", "aws:region=eu-west-1"], "argument --config: aws:region is the option --region here"),
        (["--then", "workerCount"], "argument --then: 'workerCount' is not KEY=VALUE"),
        (["--then", "a=1,aws:region=x"], "argument --then: aws:region is the option --region here"),
        (["--state", "copy,stack"], "argument --state: 'stack' is not KEY=VALUE"),
        (["--region", "us-west2"], "argument --region: 'us-west2' is not a region of AWS, e.g. us-west-2"),
        (["--project", "nowhere"], "argument --project: 'nowhere' has no Pulumi.yaml"),
    ],
)
def test_mistakes_in_options_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        options().parse_args(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {line}\n")


@pytest.mark.parametrize("region", ["us-west-2", "cn-north-1", "us-gov-west-1"])
def test_regions_of_every_partition_are_taken(region: str) -> None:
    assert options().parse_args(["--region", region, "--config", "tags=a=b,c=d"]).region == region
