"""RayCluster for other languages. Pulumi's analyzer derives the package's schema from the annotations and docstrings.

`python -m component.generate --write` writes the lines between the markers.
"""

from typing import Any, TypedDict

import pulumi

from infra.config import RayClusterArgs
from infra.ray_cluster import RayCluster as Cluster


class WorkerPool(TypedDict, total=False):
    """Pool of equal workers, which runs choose by its name or its GPU."""

    # begin of the pool's keys
    instance_types: list[str]
    """EC2 instance types in order of preference, all with the same GPUs, or all without for CPU workers; required."""
    zones: list[str]
    """Zones in order of preference, e.g. us-west-2c, each with a subnet; by default the cluster's."""
    min: int
    """Minimum number of workers, kept by the idle scale-in."""
    initial: int
    """Initial number of workers, one per instance, at least min; a run's default, which is max if this is 0."""
    max: int
    """Maximum number of workers in all zones together, at least initial and min; 0 means the larger of these."""
    spot: bool
    """Run the workers on Spot Instances (cheaper; two-minute interruption notice)."""
    on_demand: int
    """Number of workers kept on demand when spot is true, in the first zone."""
    root_volume_gib: int
    """Root EBS volume of each instance in GiB; 0 means the cluster's root_volume_gib."""
    efa: str
    """EFA network: true, false, or auto: on if max is above 1 and all types have the same EFA interfaces."""
    capacity_reservation_id: str
    """On-Demand Capacity Reservation or Capacity Block that has all instances, e.g. cr-0123456789abcdef0."""
    # end of the pool's keys


class Args(TypedDict, total=False):
    """Inputs of RayCluster, all optional."""

    # begin of the arguments
    head_instance_type: str
    """EC2 instance type of the Ray head (x86_64, at least 4 GiB), which schedules jobs and runs no training."""
    worker_instance_types: list[str]
    """EC2 instance types of the GPU workers (x86_64, NVIDIA T4 or later), in order of preference."""
    head_ami_id: str
    """AMI of the instances without GPUs, e.g. ami-0123456789abcdef0; by default the latest Amazon ECS-optimized AMI."""
    worker_ami_id: str
    """AMI of the GPU workers, with the NVIDIA driver; by default the latest Amazon ECS GPU-optimized AMI."""
    worker_count: int
    """Initial number of GPU workers, one per instance; also a job's default request."""
    min_workers: int
    """Minimum number of GPU workers, kept by the idle scale-in."""
    max_workers: int
    """Maximum number of GPU workers that jobs may request; 0 means worker_count, or min_workers if that is larger."""
    idle_timeout_minutes: int
    """Idle time in minutes (15 to 1440) after which workers of all pools are scaled in; 0 disables the scale-in."""
    sleep_after_minutes: int
    """Idle time in minutes (15 to 1440) after which the head stops until the next run; 0 keeps it running."""
    spot: bool
    """Run the GPU workers of these keys on Spot Instances (cheaper; two-minute interruption notice)."""
    on_demand_workers: int
    """Number of GPU workers kept on demand when spot is true, in the first zone."""
    worker_efa: str
    """EFA network of the GPU workers: true, false, or auto: on for several workers whose types have the same EFA."""
    worker_capacity_reservation_id: str
    """On-Demand Capacity Reservation or Capacity Block that has the GPU workers, e.g. cr-0123456789abcdef0."""
    cpu_worker_instance_types: list[str]
    """EC2 instance types of the CPU workers for data preprocessing, e.g. c6i.2xlarge; empty for no CPU workers."""
    cpu_worker_count: int
    """Initial number of CPU workers, one per instance of cpu_worker_instance_types."""
    min_cpu_workers: int
    """Minimum number of CPU workers, kept by the idle scale-in."""
    max_cpu_workers: int
    """Maximum number of CPU workers that jobs may request; 0 means cpu_worker_count, or min_cpu_workers if larger."""
    worker_pools: dict[str, WorkerPool]
    """Additional pools of workers by name, e.g. h100, each with its instance types, zones and limits."""
    redeploy_workers: str
    """Set to a new value to redeploy all workers, e.g. after the ECS deployment circuit breaker has fired."""
    rotate_token: str
    """Set to a new value to rotate the Ray token and restart all nodes, busy nodes once they are idle."""
    vpc_cidr: str
    """IPv4 CIDR block of the VPC that the cluster creates, /16 to /24."""
    vpc_id: pulumi.Input[str]
    """Existing VPC to use instead of a new one; requires subnet_ids."""
    subnet_ids: list[pulumi.Input[str]]
    """Private subnets of that VPC for all instances and tasks, in different availability zones."""
    availability_zones: list[str]
    """Zones in order of preference, e.g. us-west-2b; GPU workers have a group in each, other nodes are in the first."""
    spread_zones: bool
    """Allow one job to span those availability zones (incurs cross-AZ traffic charges)."""
    nat_gateway: bool
    """Create a NAT gateway; false creates VPC interface endpoints instead (no internet access)."""
    nat_instance: bool
    """Create a NAT instance in place of the NAT gateway; it is cheaper and slower, and stops while the head sleeps."""
    image_uri: pulumi.Input[str]
    """Existing training image to use instead of building docker/; no ECR repository is created then."""
    image_build: str
    """Builder of docker/: local (Docker on this machine), codebuild (AWS), or auto: local if Docker answers."""
    registry_secret_arn: pulumi.Input[str]
    """Secrets Manager secret with the user name and password of image_uri's registry."""
    bucket_name: pulumi.Input[str]
    """Existing S3 bucket for the runs, which outlives the cluster, instead of a new one."""
    retain_bucket: bool
    """Retain the bucket and its runs when the cluster is destroyed; takes effect with the next `pulumi up`."""
    object_version_days: int
    """Days to keep noncurrent versions of overwritten and deleted objects; 0 keeps none."""
    data_buckets: list[pulumi.Input[str]]
    """S3 buckets that training may also read, each as bucket or bucket/prefix."""
    mounts: dict[str, str]
    """Folders of S3 that all nodes read as /mnt/NAME, through Mountpoint, each NAME=s3://bucket/prefix."""
    fsx_lustre: str
    """Existing FSx for Lustre file system in vpc_id, which all nodes mount as /mnt/fsx, e.g. fs-0123456789abcdef0."""
    fsx_lustre_gib: int
    """Capacity in GiB of a new FSx for Lustre file system as /mnt/fsx, linked to fsx/ in the bucket; 0 for none."""
    efs: str
    """Existing EFS file system in vpc_id, which all nodes mount as /mnt/efs, e.g. fs-0123456789abcdef0."""
    job_secrets: list[pulumi.Input[str]]
    """ARNs of Secrets Manager secrets that jobs may read with --secret NAME=ARN."""
    environment: dict[str, pulumi.Input[str]]
    """Environment variables of all containers, and so of all jobs; a change restarts every node."""
    root_volume_gib: int
    """Root EBS volume of each instance in GiB; it holds the AMI and the unpacked training image."""
    log_retention_days: int
    """Retention of the container logs in CloudWatch Logs, in days."""
    check_quotas: bool
    """Refuse a cluster that exceeds the account's EC2 vCPU or VPC quotas; false skips the check."""
    run_max_hours: float
    """Hours of running time after which a run saves and ends, unless it has another --max-hours; 0 means unlimited."""
    run_max_usd: float
    """USD for its instances at which a run saves and ends, unless it has another --max-usd; 0 means unlimited."""
    max_hourly_usd: float
    """Refuse a cluster whose instances cost more USD per hour with all pools at their maximum; 0 disables the check."""
    alert_email: str
    """Email address for CloudWatch alarms and AWS Budgets alerts; without it, neither topic nor budget is created."""
    monthly_budget_usd: int
    """Monthly AWS budget of the whole account in USD, for alert_email."""
    tags: dict[str, pulumi.Input[str]]
    """Tags for every resource."""
    permissions_boundary: pulumi.Input[str]
    """ARN of the permissions boundary for all IAM roles."""
    task_policy_arns: list[pulumi.Input[str]]
    """ARNs of managed policies for all task roles, e.g. arn:aws:iam::123456789012:policy/read-features."""
    instance_policy_arns: list[pulumi.Input[str]]
    """ARNs of managed policies for all instance roles, e.g. for Session Manager's encryption and logging."""
    role_path: str
    """IAM path of all roles, e.g. /teams/ml/."""
    kms_key_arn: pulumi.Input[str]
    """ARN of a customer managed KMS key for bucket, disks, logs, secrets and repository; by default AWS keys."""
    # end of the arguments


class RayCluster(Cluster):
    """Ray on Amazon ECS for distributed PyTorch: network, bucket, image, head, GPU and CPU workers, monitoring."""

    # begin of the outputs
    bucket: pulumi.Output[str]
    """Name of the S3 bucket of the runs."""
    head_instance_id: pulumi.Output[str]
    """ID of the head's EC2 instance, the target of Session Manager; empty for a head that sleeps, as it changes."""
    cluster_name: pulumi.Output[str]
    """Name of the ECS cluster."""
    image_uri: pulumi.Output[str]
    """Container image of the head and the workers."""
    log_group: pulumi.Output[str]
    """Name of the CloudWatch log group of all containers."""
    metrics_dashboard: pulumi.Output[str]
    """Name of the CloudWatch dashboard: training, GPUs, tasks, network."""
    estimated_hourly_usd: pulumi.Output[float | None]
    """On-demand cost of all instances in USD per hour; none if prices are not available."""
    idle_cost: pulumi.Output[str]
    """Cost of a month training, idle, and asleep with `sleepAfterMinutes`, by part, and the command that ends it."""
    default_gpus: pulumi.Output[int]
    """Number of GPUs that a job requests by default in the pool `default`."""
    vpc_id: pulumi.Output[str]
    """ID of the VPC."""
    subnet_ids: pulumi.Output[list[str]]
    """IDs of the private subnets, one in each zone."""
    security_group_id: pulumi.Output[str]
    """ID of the tasks' security group, a source for ingress rules of other resources."""
    task_role_arns: pulumi.Output[dict[str, str]]
    """ARNs of the IAM task roles by kind of node: head, workers and, for example, cpu-workers or h100-workers."""
    task_definition_arns: pulumi.Output[dict[str, str]]
    """ARNs of the task definitions by kind of node."""
    connection: pulumi.Output[dict[str, Any]]
    """Names that `ray-on-ecs` uses to connect; a program that exports it as `connection` can be its stack."""
    train_command: pulumi.Output[str]
    """Command that trains on the cluster through Session Manager and streams the log."""
    shell_command: pulumi.Output[str]
    """Command that opens a shell in the head's container."""
    dashboard_command: pulumi.Output[str]
    """Command that forwards the Ray dashboard to http://localhost:8265."""
    token_command: pulumi.Output[str]
    """Command that prints the Ray token, for the dashboard's login."""
    wake_command: pulumi.Output[str]
    """Command that wakes a head that sleeps; none for one that does not."""
    # end of the outputs

    def __init__(self, name: str, args: Args, opts: pulumi.ResourceOptions | None = None) -> None:
        given: dict[str, Any] = {argument: value for argument, value in args.items() if value is not None}
        super().__init__(name, RayClusterArgs.in_camel_case(**given), opts)
