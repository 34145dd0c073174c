"""A Ray cluster on ECS as one component, for this project's program, for others, and for other languages.

Pulumi reads the annotations of RayCluster as they stand for the schema that it offers other languages, and their
docstrings: this module can't postpone annotations.
"""

import os
from pathlib import Path
from typing import Any

import pulumi

from infra import config
from infra.auth import AuthToken, AuthTokenArgs
from infra.capacity import Capacity, CapacityArgs
from infra.cluster import Cluster, ClusterArgs
from infra.cluster_info import ClusterInfo, ClusterInfoArgs
from infra.config.settings import RayClusterArgs, Settings
from infra.definitions import commands
from infra.discovery import Discovery, DiscoveryArgs
from infra.image import Image, ImageArgs
from infra.monitoring import Monitoring, MonitoringArgs
from infra.network import Network, NetworkArgs
from infra.node_scaling import NodeScaling, NodeScalingArgs
from infra.ray_nodes import TaskDefaults
from infra.ray_service import RayService, RayServiceArgs
from infra.ray_task import RayTask
from infra.references import AccountRules, ExistingNetwork, NodeSpec, Scale
from infra.sessions import Sessions, SessionsArgs
from infra.storage import Storage, StorageArgs
from infra.tags import company_tags, name_prefix

ROOT = Path(__file__).parents[1]


class RayCluster(pulumi.ComponentResource):
    """Ray on Amazon ECS for distributed PyTorch: network, bucket, image, head, GPU and CPU workers, monitoring.

    The names of all its parts in the account begin with its own name, which is therefore cut where it is long. It is
    made in the account and region of the default AWS provider (`aws:region`).
    """

    bucket: pulumi.Output[str]
    """Name of the bucket that keeps the runs."""
    head_instance_id: pulumi.Output[str]
    """ID of the head's instance, which Session Manager reaches."""
    cluster_name: pulumi.Output[str]
    """Name of the ECS cluster."""
    image_uri: pulumi.Output[str]
    """The training image."""
    log_group: pulumi.Output[str]
    """Name of the CloudWatch log group of all containers."""
    metrics_dashboard: pulumi.Output[str]
    """Name of the CloudWatch dashboard."""
    estimated_hourly_usd: pulumi.Output[float | None]
    """Cost of all instances an hour, in USD on demand; none where AWS would not say."""
    default_gpus: pulumi.Output[int]
    """Number of GPUs that a job requests by default."""
    connection: pulumi.Output[dict[str, Any]]
    """Names by which `ray-on-ecs` finds the cluster; any program that exports it as `connection` can be its stack."""
    train_command: pulumi.Output[str]
    """Shell line that trains."""
    shell_command: pulumi.Output[str]
    """Shell line that opens a shell in the head's container."""
    dashboard_command: pulumi.Output[str]
    """Shell line that forwards Ray's dashboard to this machine."""
    token_command: pulumi.Output[str]
    """Shell line that prints Ray's token."""

    def __init__(self, name: str, args: RayClusterArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        if opts and (opts.provider or opts.providers):
            raise pulumi.RunError(
                f"{name}: is made by the default AWS provider alone; set aws:region and aws:profile, and give no other"
            )
        settings, given_network = _read(args)
        prefix = name_prefix(name)
        plan = config.plan(settings, prefix, given_network)
        tagged = pulumi.ResourceOptions(transformations=[company_tags(settings.tags)])
        super().__init__("ray-on-ecs:index:RayCluster", name, None, pulumi.ResourceOptions.merge(opts, tagged))
        rules = AccountRules(
            permissions_boundary=settings.permissions_boundary,
            role_path=settings.role_path,
            kms_key_arn=settings.kms_key_arn,
            task_policy_arns=settings.task_policy_arns,
        )
        key = rules.kms_key_arn
        opts = pulumi.ResourceOptions(parent=self)

        cluster = Cluster(
            f"{prefix}-ray",
            ClusterArgs(made_for=plan.identity, log_retention_days=settings.log_retention_days, kms_key_arn=key),
            opts,
        )
        network = Network(
            f"{prefix}-network",
            NetworkArgs(
                vpc_cidr=settings.vpc_cidr,
                location=plan.location,
                cluster_name=config.check_state(cluster.name, cluster.made_for, plan.identity, plan.up),
                nat_gateway=settings.nat_gateway,
                spot=settings.spot,
                reads_secrets=bool(settings.job_secrets),
            ),
            opts,
        )
        storage_args = StorageArgs(
            retain=settings.retain_bucket,
            version_days=settings.object_version_days,
            existing=settings.bucket_name,
            partition=plan.location.partition,
            kms_key_arn=key,
        )
        storage = Storage(f"{prefix}-storage", storage_args, opts)
        image_uri = pulumi.Output.from_input(
            settings.image_uri or Image(f"{prefix}-image", _image_args(key), opts).image_uri
        )
        auth = AuthToken(f"{prefix}-auth", AuthTokenArgs(kms_key_arn=key, rotate=settings.rotate_token), opts)
        discovery = Discovery(f"{prefix}-discovery", DiscoveryArgs(namespace=cluster.name, vpc_id=network.vpc_id), opts)

        kinds: dict[str, tuple[NodeSpec, Scale | None]] = {
            "head": (plan.head, None),
            "workers": (plan.worker, settings.workers),
        }
        if plan.cpu_worker:
            kinds["cpu-workers"] = plan.cpu_worker, settings.cpu_workers
        capacities = {
            kind: Capacity(
                f"{prefix}-{kind}",
                CapacityArgs(
                    location=plan.location,
                    cluster=cluster.ref,
                    network=network.ref,
                    node=node,
                    rules=rules,
                    managed_scaling=scale is not None,
                    root_volume_gib=settings.root_volume_gib,
                ),
                opts,
            )
            for kind, (node, scale) in kinds.items()
        }
        association = cluster.associate([each.provider_name for each in capacities.values()])
        agents = [each.join_cluster(association) for each in capacities.values()]
        info = ClusterInfo(
            f"{prefix}-cluster-info",
            ClusterInfoArgs(
                head=plan.head,
                worker=plan.worker,
                cpu_worker=plan.cpu_worker,
                scales={kind: scale for kind, (_, scale) in kinds.items() if scale},
                group_name=capacities["workers"].group.name,
                subnets=network.ref.subnets,
                placement_groups=capacities["workers"].placement_groups,
            ),
            opts,
        )

        tasks = TaskDefaults(
            cluster=cluster.ref,
            location=plan.location,
            rules=rules,
            image_uri=image_uri,
            registry_secret_arn=settings.registry_secret_arn,
            logs=cluster.logs,
            token_parameter_arn=auth.parameter_arn,
            bucket=storage.bucket,
            data_buckets=settings.data_buckets,
            job_secrets=settings.job_secrets,
        )
        head_args = tasks.head(
            plan.head.task,
            cluster_info_parameter=info.parameter,
            group=capacities["workers"].group,
            moves=plan.worker.moves,
            cpu_workers=plan.cpu_worker is not None,
        )
        of_kind = {"head": RayTask(f"{prefix}-head-task", head_args, opts)}
        of_kind["workers"] = RayTask(
            f"{prefix}-worker-task",
            tasks.worker(plan.worker.task, discovery.head_host, capacities["workers"].group),
            opts,
        )
        if plan.cpu_worker:
            of_kind["cpu-workers"] = RayTask(
                f"{prefix}-cpu-worker-task", tasks.cpu_worker(plan.cpu_worker.task, discovery.head_host), opts
            )
        # A run needs all kinds of nodes till its end.
        needed = [association, *agents, *(policy for task in of_kind.values() for policy in task.role_policies)]
        services: dict[str, RayService] = {}
        for kind, (node, scale) in kinds.items():
            service_args = RayServiceArgs(
                cluster=cluster.ref,
                network=network.ref,
                # Wherever a job has moved the group: ECS places tasks in the service's subnets alone.
                zones=tuple(network.ref.subnets) if node.moves else node.zones,
                task_definition_arn=of_kind[kind].definition_arn,
                capacity_provider=capacities[kind].provider_name,
                count=scale.initial_count if scale else 1,
                autoscaled=scale is not None and scale.max_count > 0,
                redeploy=_redeploy(settings, is_head=scale is None),
                registry_arn=None if scale else discovery.registry_arn,
                after=needed,
            )
            services[kind] = RayService(f"{prefix}-ray-{kind}", service_args, opts)
            if scale and scale.max_count:
                NodeScaling(
                    f"{prefix}-{kind}-scaling",
                    NodeScalingArgs(
                        service=services[kind].ref,
                        head=services["head"].ref,
                        group_name=capacities[kind].group.name,
                        scale=scale,
                        kind=kind,
                        node=node,
                    ),
                    opts,
                )
        refs = {kind: service.ref for kind, service in services.items()}
        monitoring = Monitoring(
            f"{prefix}-monitoring",
            MonitoringArgs(region=plan.region, services=refs, alerts=settings.alerts),
            opts,
        )

        sessions = Sessions(f"{prefix}-sessions", SessionsArgs(gpus=plan.gpus), opts)
        head_id = capacities["head"].instance_id(services["head"])
        train, shell = (pulumi.Output.all(head_id, document) for document in (sessions.train, sessions.shell))
        dashboard = pulumi.Output.all(head_id, discovery.head_host, sessions.forward)
        known: dict[str, pulumi.Output[Any]] = {
            "bucket": storage.bucket.name,
            "head_instance_id": head_id,
            "cluster_name": cluster.ref.name,
            "log_group": cluster.logs.name,
            "metrics_dashboard": monitoring.dashboard_name,
            "estimated_hourly_usd": pulumi.Output.from_input(plan.hourly_usd),
            "default_gpus": pulumi.Output.from_input(plan.gpus),
        }
        connection = pulumi.Output.all(
            **known,
            region=plan.region,
            head_host=discovery.head_host,
            token_parameter=auth.parameter_name,
            cluster_info_parameter=info.parameter.name,
            shell_document=sessions.shell,
            forward_document=sessions.forward,
            services={kind: ref.name for kind, ref in refs.items()},
        )
        outputs: dict[str, pulumi.Output[Any]] = {
            **known,
            "image_uri": image_uri,
            "connection": connection,
            "train_command": train.apply(lambda found: commands.session(plan.region, *found)),
            "shell_command": shell.apply(lambda found: commands.session(plan.region, *found)),
            "dashboard_command": dashboard.apply(lambda found: commands.dashboard(plan.region, *found)),
            "token_command": auth.parameter_name.apply(lambda name: commands.token(plan.region, name)),
        }
        vars(self).update(outputs)
        self.register_outputs(outputs)


def _read(args: RayClusterArgs) -> tuple[Settings, ExistingNetwork | None]:
    """The arguments as settings, and the network if the same program makes it, so that AWS can't be asked yet.

    Raises:
        RunError: One cannot work.
    """
    defaults = vars(Settings())
    if unknown := args.keys() - defaults.keys():
        raise pulumi.RunError(f"{', '.join(sorted(unknown))}: is no argument of RayCluster; see RayClusterArgs")
    given = {key: _as(defaults[key], value) for key, value in args.items()}
    network = None
    subnets = given.get("subnet_ids", ())
    asked_about = [given.get("vpc_id"), *(subnets if isinstance(subnets, tuple) else [subnets])]
    if any(isinstance(each, pulumi.Output) for each in asked_about):
        network = _given_network(given)
    return config.in_one_line(lambda: Settings(**given)), network


def _as(default: object, value: Any) -> Any:
    """The value as Settings has it: a tuple of a list, and an integer of the float that other languages hand over."""
    if isinstance(default, int) and isinstance(value, float) and value.is_integer():
        return int(value)
    return tuple(value) if isinstance(value, list) else value


def _redeploy(settings: Settings, *, is_head: bool) -> dict[str, str]:
    """Words of which another one deploys a service again: nodes read the token when they start."""
    words = {"token": settings.rotate_token, "redeploy": "" if is_head else settings.redeploy_workers}
    return {cause: word for cause, word in words.items() if word}


def _given_network(given: dict[str, Any]) -> ExistingNetwork:
    """Take a network of the same program out of the arguments."""
    vpc_id, subnets, zones = given.pop("vpc_id", ""), given.pop("subnet_ids", ()), given.get("availability_zones", ())
    if isinstance(subnets, pulumi.Output):
        raise pulumi.RunError("subnet_ids: is an Output; give a list with one for each zone, such as [subnet.id]")
    if not (vpc_id and subnets and len(subnets) == len(zones)):
        raise pulumi.RunError(
            f"availability_zones: {', '.join(zones) or 'none'} for {len(subnets)} subnet_ids of a VPC that the "
            "same program makes; give vpc_id, and the zone of each subnet in their order"
        )
    if not given.get("nat_gateway", True):
        raise pulumi.RunError(
            "nat_gateway: False is of a VPC of the cluster's own; give this VPC its endpoints yourself"
        )
    return ExistingNetwork(vpc_id=vpc_id, subnets=dict(zip(zones, subnets, strict=True)))


def _image_args(kms_key_arn: str) -> ImageArgs:
    """The image of docker/. awsx hashes the path as it stands: it has to be the same on every machine."""
    context = os.path.relpath(ROOT)
    return ImageArgs(context=context, dockerfile=f"{context}/docker/Dockerfile", kms_key_arn=kms_key_arn)
