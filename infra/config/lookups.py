"""Look-ups of existing resources that settings name: questions to AWS, whose answers lookup_rules.py judges.

A denied call is a warning that names the IAM action, or a refusal where the plan needs the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pulumi
import pulumi_aws as aws

from infra.config import buckets
from infra.config import lookup_rules as rules
from infra.config.lookup_rules import Rule
from infra.config.together import together
from infra.definitions import efa
from infra.definitions.policies import ECR_IMAGE
from infra.definitions.sizing import InstanceType, network_gbits
from infra.definitions.user_data import RESOLVE
from infra.errors import SettingError, error_reason, is_absent, warn
from infra.types import Caller, ExistingNetwork, NodeSpec, known
from ray_on_ecs.contract import DEFAULT_POOL, field_of

if TYPE_CHECKING:
    from infra.config.args import RayClusterArgs

Options = pulumi.InvokeOptions | None
# ID that EC2 reports for a VPC without DHCP options.
NO_DHCP_OPTIONS = "default"
REFUSE, WARN, IGNORE = "refuse", "warn", "ignore"


@dataclass(frozen=True)
class Question:
    """Look-up of a resource that a setting names.

    Attributes:
        field: Setting.
        value: Name or ARN of the resource.
        action: IAM action of the call.
        call: Raises an exception if the resource is absent or the caller lacks the permission.
        rules: Conditions on the answer.
        hint: Way out if the resource is absent or unfit.
        absent: Consequence of an absent resource.
        denied: Consequence of a denied call.
    """

    field: str
    value: str
    action: str
    call: Callable[..., Any]
    rules: Sequence[Rule]
    hint: str = "use one of this account"
    absent: str = REFUSE
    denied: str = WARN


def ask_all(questions: Sequence[Question], opts: Options = None) -> Iterator[Any]:
    """AWS's answers to questions that are asked together, at the first `next`; each is judged when it is taken."""
    yield from map(judged, questions, _asked(questions, opts))


def _asked(questions: Iterable[Question], opts: Options) -> list[Future[Any]]:
    return together(*(partial(question.call, opts=opts) for question in questions))


def judged(question: Question, asked: Future[Any]) -> Any:
    """The answer to a question that has been asked, with the errors of `ask`."""
    try:
        answer = asked.result()
    except Exception as error:  # The SDK raises a bare Exception for every error of the provider.
        reason = error_reason(error)
        if is_absent(reason):
            _tell(question, question.absent, f"could not be found ({reason})", question.hint)
        else:
            fate = "is taken unchecked" if question.denied == WARN else "is needed for the plan"
            problem = f"could not be looked up ({question.action}: {reason}), and {fate}"
            _tell(question, question.denied, problem, f"grant the caller {question.action}, or try again")
        return None
    judge(question, question.rules, answer)
    return answer


def judge(question: Question, conditions: Sequence[Rule], answer: Any) -> None:
    """Refuse an unfit answer with a SettingError, or warn about it."""
    for rule in conditions:
        if problem := rule.problem_of(answer):
            _tell(question, WARN if rule.is_warning else REFUSE, problem, rule.hint or question.hint)


def _tell(question: Question, consequence: str, problem: str, hint: str) -> None:
    error = SettingError(question.field, question.value, problem, hint)
    if consequence == REFUSE:
        raise error
    if consequence == WARN:
        pulumi.log.warn(str(error))


def check(args: RayClusterArgs, caller: Caller, opts: Options = None) -> pulumi.Input[str]:
    """Look up policies, secrets, key, buckets and image; Outputs, whose resources do not exist yet, are skipped.

    Returns:
        `image_uri`, with the current digest in place of a tag in this account's ECR.
    """
    questions = [*_policies(args), *_secrets(args), *_key(args), *_buckets(args, caller)]
    answers = ask_all(questions, opts)
    for question in questions:
        if question.value.startswith("arn:"):
            _, partition, service, region, account, *_ = question.value.split(":")
            conditions = rules.arn(caller.partition, caller.region, caller.account, shared=service != "iam")
            judge(question, conditions, SimpleNamespace(partition=partition, region=region, account=account))
        next(answers)
    return _image(args, caller, opts)


def _policies(args: RayClusterArgs) -> Iterator[Question]:
    hint = "use customer managed policies of this account, or AWS managed policies"
    named: dict[str, Sequence[pulumi.Input[str]]] = {
        "permissions_boundary": [args.permissions_boundary],
        "task_policy_arns": args.task_policy_arns,
        "instance_policy_arns": args.instance_policy_arns,
    }
    for field, arns in named.items():
        for arn in _known(*arns):
            yield Question(field, arn, "iam:GetPolicy", partial(aws.iam.get_policy, arn=arn), rules.POLICY, hint)


def _secrets(args: RayClusterArgs) -> Iterator[Question]:
    hint = "use the complete ARN of a secret, with the six characters at its end; one to be deleted can be restored"
    # The user's policies are attached to task roles; the execution roles read the registry's secret.
    ways = {"registry_secret_arn": "", "job_secrets": ", or add a policy to task_policy_arns"}
    named = {"registry_secret_arn": _known(args.registry_secret_arn), "job_secrets": _known(*args.job_secrets)}
    for field, way in ways.items():
        to_use = f"use kms_key_arn or AWS's key{way}"
        conditions = rules.encryption("kms_key_id", args.kms_key_arn, to_use, is_warning=bool(way))
        for arn in named[field]:
            yield Question(field, arn, "secretsmanager:DescribeSecret", partial(_secret, arn), conditions, hint)


def _secret(arn: str, opts: Options) -> aws.secretsmanager.GetSecretResult:
    """A secret, with the ARN of its key in place of an alias."""
    secret = aws.secretsmanager.get_secret(arn=arn, opts=opts)
    key = secret.kms_key_id or ""
    if "alias/" in key and "alias/aws/" not in key:
        with suppress(Exception):  # denied: the alias stays
            pulumi.set(secret, "kms_key_id", aws.kms.get_key(key_id=key, opts=opts).arn)
    return secret


def _key(args: RayClusterArgs) -> Iterator[Question]:
    """The KMS key, and the service-linked roles that launch instances, to which the stack grants the key.

    EC2 Auto Scaling may create the role of Spot Instances, but a grant needs it before.
    https://docs.aws.amazon.com/autoscaling/ec2/userguide/key-policy-requirements-EBS-encryption.html
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/service-linked-roles-spot-instance-requests.html
    """
    for key in _known(args.kms_key_arn):
        call = partial(aws.kms.get_key, key_id=key)
        yield Question("kms_key_arn", key, "kms:DescribeKey", call, rules.KEY)
    roles = {"AWSServiceRoleForAutoScaling": "autoscaling.amazonaws.com"} if args.kms_key_arn else {}
    on_spot = [field_of(name, "spot") for name, pool in args.pools.items() if pool.spot_count]
    if on_spot:
        roles["AWSServiceRoleForEC2Spot"] = "spot.amazonaws.com"
    for name, service in roles.items():
        field, absent, denied = ("kms_key_arn", REFUSE, WARN) if args.kms_key_arn else (on_spot[0], WARN, IGNORE)
        hint = f"create it: `aws iam create-service-linked-role --aws-service-name {service}`"
        yield Question(field, name, "iam:GetRole", partial(aws.iam.get_role, name=name), [], hint, absent, denied)


def _buckets(args: RayClusterArgs, caller: Caller) -> Iterator[Question]:
    region, key = caller.region, args.kms_key_arn
    hint = "use an existing bucket, or leave it empty to create one"
    for name in _known(args.bucket_name):
        conditions = rules.bucket(region, is_warning=False)
        yield Question("bucket_name", name, "s3:ListBucket", partial(buckets.get, name), conditions, hint)
        facts = partial(buckets.Facts, name, region, caller.account, buckets.OF_RUNS)
        conditions = rules.BUCKET + rules.encryption("kms_key", key, "set kms_key_arn to that key", is_warning=True)
        conditions += rules.LINKED_BUCKET if args.fsx_lustre_gib else []
        yield Question("bucket_name", name, "s3:GetBucketVersioning", facts, conditions, hint, IGNORE, IGNORE)
    # Without a NAT gateway, the stack's VPC leads only to S3 of its region; a VPC of the user may have other ways.
    conditions = rules.bucket(region, is_warning=args.nat_gateway or bool(args.vpc_id))
    to_use = "set kms_key_arn to that key, or add a policy to task_policy_arns, of mounts to instance_policy_arns"
    of_facts = rules.DATA_BUCKET + rules.encryption("kms_key", key, to_use, is_warning=True)
    sources = [("data_buckets", source, source) for source in _known(*args.data_buckets)]
    sources += [("mounts", address, address.removeprefix("s3://")) for address in args.mounts.values()]
    for field, shown, source in sources:
        name, hint = source.partition("/")[0], "use existing buckets"
        yield Question(field, shown, "s3:ListBucket", partial(buckets.get, name), conditions, hint)
        facts = partial(buckets.Facts, name, region, caller.account, buckets.OF_DATA)
        yield Question(field, shown, "s3:GetEncryptionConfiguration", facts, of_facts, hint, IGNORE, IGNORE)


def _image(args: RayClusterArgs, caller: Caller, opts: Options) -> pulumi.Input[str]:
    uri = known(args.image_uri)
    image = ECR_IMAGE.match(uri)
    if image and not args.nat_gateway and image["region"] != caller.region:
        problem = f"leaves the image in {image['region']} unreachable: VPC endpoints lead only to {caller.region}"
        hint = f"use an image in {caller.region}, or keep nat_gateway at true"
        raise SettingError("nat_gateway", False, problem, hint)
    name, _, digest = uri.partition("@")
    if image and image["account"] == caller.account:
        which = {"image_digest": digest} if digest else {"image_tag": name[image.end() :].lstrip(":")}
        call = partial(aws.ecr.get_image, repository_name=image["name"], region=image["region"], **which)
        pools = [name for name, pool in args.pools.items() if pool.most]
        field, disk_gib = min((_disk(args, name) for name in ("", *pools)), key=lambda disk: disk[1])
        conditions = rules.ecr_image(field, disk_gib)
        hint = "push it first, or leave it empty to build docker/"
        [found] = ask_all([Question("image_uri", uri, "ecr:DescribeImages", call, conditions, hint)], opts)
        if found and not digest:
            return f"{image[0]}@{found.image_digest}"
    if uri and not digest:
        warn(
            f"image_uri: ECS keeps the image that {uri} names at this `pulumi up`: a later push is not deployed, and "
            "no task starts once that image is deleted; pin it with repository@sha256:digest"
        )
    return args.image_uri


def check_machine_images(args: RayClusterArgs, nodes: Iterable[NodeSpec], opts: Options = None) -> None:
    """Look up the nodes' AMIs: those of the settings, and those that public SSM parameters name now."""
    groups: dict[str, list[NodeSpec]] = {}
    for node in nodes:
        if node.max_count:
            groups.setdefault(node.ami_id, []).append(node)
    parameters = {name: _parameter(name, group) for name, group in groups.items() if name.startswith(RESOLVE)}
    named = dict(zip(parameters, _asked(parameters.values(), opts), strict=True))
    # `value` is a secret output.
    ids = {name: "" if asked.exception() else asked.result().insecure_value for name, asked in named.items()}
    images = {
        name: _ami(args, name, ids.get(name, name), group) for name, group in groups.items() if ids.get(name, name)
    }
    described = dict(zip(images, _asked(images.values(), opts), strict=True))
    for name in groups:
        if name in parameters:
            judged(parameters[name], named[name])
        if name in images:
            judged(images[name], described[name])


def _parameter(name: str, group: Sequence[NodeSpec]) -> Question:
    """Question for the public SSM parameter that names the AMI of these nodes."""
    call = partial(aws.ssm.get_parameter, name=name.removeprefix(RESOLVE))
    return Question(_ami_field(group), name, "ssm:GetParameter", call, [], "set the ID of an AMI")


def _ami(args: RayClusterArgs, name: str, ami_id: str, group: Sequence[NodeSpec]) -> Question:
    """Question for the AMI of these nodes, which a setting or a public SSM parameter names."""
    hint = "use the Amazon ECS-optimized AMI (leave it empty), or one of this region that is derived from it"
    disk = min((_disk(args, node.pool) for node in group), key=lambda disk: disk[1])
    if name == ami_id:
        instances = [instance for node in group for instance in node.instances]
        conditions, absent = rules.ami(instances, *disk, gpus=_has_gpus(group)), REFUSE
        conditions += [rules.MOUNTPOINT] if args.mounts else []
    else:
        conditions, absent = rules.public_ami(*disk), WARN
    # A deprecated AMI can still be launched by its ID.
    filters = [aws.ec2.GetAmiFilterArgsDict(name="image-id", values=[ami_id])]
    call = partial(aws.ec2.get_ami, filters=filters, include_deprecated=True)
    return Question(_ami_field(group), ami_id, "ec2:DescribeImages", call, conditions, hint, absent)


def _ami_field(group: Sequence[NodeSpec]) -> str:
    return "worker_ami_id" if _has_gpus(group) else "head_ami_id"


def _has_gpus(group: Sequence[NodeSpec]) -> bool:
    return any(node.task.gpus for node in group)


def _disk(args: RayClusterArgs, pool: str) -> tuple[str, int]:
    """Field and GiB of the root volumes of a pool, or of the head."""
    own = args.pools[pool].root_volume_gib if pool else 0
    return (field_of(pool, "root_volume_gib"), own) if own else ("root_volume_gib", args.root_volume_gib)


def existing_network(args: RayClusterArgs, caller: Caller, opts: Options = None) -> ExistingNetwork:
    """Subnets of an existing VPC by zone; SettingError if VPC or subnets are unfit, or a zone stays unknown."""
    vpc_id, region = known(args.vpc_id), caller.region
    call, conditions = partial(aws.ec2.get_vpc, id=vpc_id), rules.vpc(caller.account, region, vpc_id)
    hint = f"use another VPC of this account in {region}, or leave it empty to create one"
    questions = [Question("vpc_id", vpc_id, "ec2:DescribeVpcs", call, conditions, hint)]
    subnets: dict[str, pulumi.Input[str]] = {}
    public: set[str] = set()
    conditions = rules.subnet(vpc_id, lambda zone: _most_in(args, zone, [*args.availability_zones, *subnets, zone][0]))
    names, hint = _known(*args.subnet_ids), f"use another subnet of {vpc_id}"
    for name in names:
        call = partial(aws.ec2.get_subnet, id=name)
        questions.append(Question("subnet_ids", name, "ec2:DescribeSubnets", call, conditions, hint, denied=REFUSE))
    answers = ask_all(questions, opts)
    vpc, questions = next(answers), []
    if vpc and vpc.dhcp_options_id != NO_DHCP_OPTIONS:
        call = partial(aws.ec2.get_vpc_dhcp_options, dhcp_options_id=vpc.dhcp_options_id)
        conditions = rules.dhcp_options(vpc.cidr_block)
        questions.append(Question("vpc_id", vpc_id, "ec2:DescribeDhcpOptions", call, conditions))
    for name in names:
        call = partial(_route_table, name, vpc.main_route_table_id if vpc else "")
        questions.append(Question("subnet_ids", name, "ec2:DescribeRouteTables", call, rules.ROUTES, absent=IGNORE))
    more = ask_all(questions, opts)
    if len(questions) > len(names):
        next(more)
    for name in names:
        subnet = next(answers)
        zone = subnet.availability_zone
        if zone in subnets:
            raise SettingError("subnet_ids", name, f"is in {zone}, like {subnets[zone]}", "use one subnet per zone")
        subnets[zone] = name
        if subnet.map_public_ip_on_launch:
            public.add(zone)
        next(more)
    return ExistingNetwork(vpc_id=vpc_id, subnets=subnets, public_zones=frozenset(public))


def _most_in(args: RayClusterArgs, zone: str, first: str) -> int:
    """Maximum number of nodes in a zone; the first has the head and pools without zones."""
    zones = {name: pool.zones or (first,) for name, pool in args.pools.items()}
    zones[DEFAULT_POOL] = args.availability_zones or (zone,)
    return (zone == first) + sum(pool.most for name, pool in args.pools.items() if zone in zones[name])


def _route_table(subnet_id: str, main_id: str, opts: Options) -> Any:
    """Route table of a subnet; without an association this is the VPC's main one."""
    try:
        return aws.ec2.get_route_table(subnet_id=subnet_id, opts=opts)
    except Exception as error:
        if not (main_id and is_absent(error_reason(error))):
            raise
    return aws.ec2.get_route_table(route_table_id=main_id, opts=opts)


def instance_types(
    field: str, names: Sequence[str], region: str, usages: Sequence[str], *, grouped: bool = False
) -> list[Question]:
    """Questions for the instance types in a setting.

    `usages` are "on-demand", "spot" or both, and `grouped` instances with GPUs share a cluster placement group.
    """
    conditions, hint = rules.instance_type(usages, grouped=grouped), f"use an instance type that {region} offers"
    questions = []
    for name in names:
        call = partial(aws.ec2.get_instance_type, instance_type=name)
        questions.append(Question(field, name, "ec2:DescribeInstanceTypes", call, conditions, hint, denied=REFUSE))
    return questions


def described(questions: Sequence[Question], answers: Iterator[Any]) -> tuple[InstanceType, ...]:
    """Instance types of the questions; SettingError if one is unfit or can't be looked up."""
    return tuple(_described(question.value, answer) for question, answer in zip(questions, answers, strict=False))


def _described(name: str, answer: aws.ec2.GetInstanceTypeResult) -> InstanceType:
    gpu = answer.gpuses[0] if answer.gpuses else None
    others = answer.neuron_devices, answer.inference_accelerators, answer.fpgas, answer.media_accelerators
    return InstanceType(
        name=name,
        vcpus=answer.default_vcpus,
        memory_mib=answer.memory_size,
        architectures=tuple(answer.supported_architectures),
        gpus=sum(gpu.count for gpu in answer.gpuses),
        gpu_name=gpu.name if gpu else "",
        gpu_memory_mib=gpu.memory_size if gpu else 0,
        gpu_manufacturer=gpu.manufacturer if gpu else "",
        boot_modes=tuple(answer.boot_modes or ()),
        tpm=answer.nitro_tpm_support != "unsupported",
        disk_mb=answer.ebs_performance_maximum_throughput or 0,
        local_disk_gb=sum(disk.count * disk.size for disk in answer.instance_disks or () if disk.type == "ssd"),
        accelerators=tuple(dict.fromkeys(device.name for devices in others for device in devices or ())),
        efa_cards=efa.cards(
            interfaces=(answer.efa_maximum_interfaces or 0) if gpu else 0,
            network_cards=answer.maximum_network_cards or 1,
            slots=min(
                (card.maximum_interfaces or 0 for card in answer.network_cards or () if not card.index), default=0
            ),
        ),
        network_gbits=network_gbits(
            [card.baseline_bandwidth or 0 for card in answer.network_cards or ()], answer.network_performance or ""
        ),
    )


def _known(*values: pulumi.Input[str]) -> list[str]:
    """Plain, non-empty values."""
    return [plain for value in values if (plain := known(value))]
