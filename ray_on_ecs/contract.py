"""Names and numbers on which the stack (infra/) and this package agree: container, variables, labels, quotas.

This module does not import anything, and infra/ does not import any other module of this package.
"""

# Finds the head's container by the ECS agent's label, as Docker's names of tasks have a random suffix.
HEAD = "ray-head"
HEAD_CONTAINER = f"sudo docker ps -qf label=com.amazonaws.ecs.container-name={HEAD} -f health=healthy"
# Ray's dashboard, with the Jobs API.
DASHBOARD_PORT = 8265
DASHBOARD_URL = f"http://127.0.0.1:{DASHBOARD_PORT}"  # on the head itself

# Jupyter, on the head or on a worker: a port that a node's servers don't use (docs/design/nodes.md).
NOTEBOOK_PORT = 8888

# Prefix of the runs in the stack's bucket.
RUNS_PREFIX = "runs"
# Seconds that a run waits for its workers: a new instance takes minutes, and longer if GPUs are scarce.
WORKER_TIMEOUT = 1800

# Folder of the stack's file systems on every node, and the names of two of them; the others are folders of S3.
MOUNTS_DIR = "/mnt"
FSX_MOUNT, EFS_MOUNT = "fsx", "efs"

# Environment variables of the containers: the CloudWatch namespace of the stack; the folder of the head's state; the
# SSM parameter with the cluster info; the head's DNS name; the file with the instance's type, zone and market; and the
# prefix and the KMS key of the SSM parameters with runs' secrets.
CLOUDWATCH_NAMESPACE_VARIABLE = "CLOUDWATCH_NAMESPACE"
HEAD_STATE_VARIABLE = "RAY_HEAD_STATE"
CLUSTER_INFO_VARIABLE = "CLUSTER_INFO"
HEAD_HOST_VARIABLE = "RAY_HEAD_HOST"
INSTANCE_FILE_VARIABLE = "INSTANCE_FILE"
SECRETS_VARIABLE = "SECRETS_PREFIX"
SECRETS_KEY_VARIABLE = "SECRETS_KEY"
# The Capacity Block that has a worker's instance; not set elsewhere.
BLOCK_VARIABLE = "CAPACITY_BLOCK"
# The folder with the documents by which the head and its users reach each other: s3://BUCKET/clusters/CLUSTER.
DOCUMENTS_VARIABLE = "CLUSTER_DOCUMENTS"
CLUSTERS_PREFIX = "clusters"

# EC2's markets, as its instance metadata names them.
SPOT, ON_DEMAND = "spot", "on-demand"
# Labels of a worker's Ray node, by the keys of the instance's file. Zone, market and group have Ray's names; Ray
# takes the group from RAY_NODE_TYPE_NAME.
# https://docs.ray.io/en/latest/ray-core/scheduling/labels.html
INSTANCE_LABELS = {
    "instance_type": "instance-type",
    "zone": "ray.io/availability-zone",
    "market": "ray.io/market-type",
}
# Other keys of the instance's file: its ID; and, as labels, too, when EC2 launched it and its kernel booted.
INSTANCE_ID = "instance_id"
INSTANCE_MOMENTS = ("launched", "booted")
# File beside it: the last answers of the instance's metadata service, by their paths there; no key without an answer.
NOTICES_FILE = "notices.json"
SPOT_ACTION = "spot/instance-action"
REBALANCE = "events/recommendations/rebalance"
LIFECYCLE_STATE = "autoscaling/target-lifecycle-state"
SCHEDULED_EVENTS = "events/maintenance/scheduled"
# File beside it with a line about the instance's local disks, if its pool has a type with any.
LOCAL_DISKS_FILE = "local-disks"
NODE_GROUP_LABEL, NODE_GROUP_VARIABLE = "ray.io/node-group", "RAY_NODE_TYPE_NAME"
# Kinds of workers: the default pool's, and those of the pool without GPUs that the stack's own keys describe.
WORKERS, CPU_WORKERS = "workers", "cpu-workers"
# Names of these two pools; `workerPools` adds others. A node's label NODE_GROUP_LABEL is the name of its pool, but the
# default pool's nodes don't have it, and that of the CPU workers is CPU_WORKERS.
DEFAULT_POOL, CPU_POOL = "default", "cpu"
# Fields of the stack's arguments that are keys of these two pools; other keys are the default pool's.
SETTINGS = {
    DEFAULT_POOL: {
        "instance_types": "worker_instance_types",
        "zones": "availability_zones",
        "min": "min_workers",
        "initial": "worker_count",
        "max": "max_workers",
        "spot": "spot",
        "on_demand": "on_demand_workers",
        "root_volume_gib": "root_volume_gib",
        "efa": "worker_efa",
        "capacity_reservation_id": "worker_capacity_reservation_id",
    },
    CPU_POOL: {
        "instance_types": "cpu_worker_instance_types",
        "min": "min_cpu_workers",
        "initial": "cpu_worker_count",
        "max": "max_cpu_workers",
    },
}
# GPUs by instance family, as EC2 names them.
# https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html
GPUS = {
    "g4dn": "T4",
    "g5": "A10G",
    "g6": "L4",
    "g6f": "L4",
    "gr6": "L4",
    "gr6f": "L4",
    "g6e": "L40S",
    "g7": "RTX PRO 4500",
    "g7e": "RTX PRO Server 6000",
    "p4d": "A100",
    "p4de": "A100",
    "p5": "H100",
    "p5e": "H200",
    "p5en": "H200",
    "p6-b200": "B200",
    "p6-b300": "B300",
}
# EC2's type of a reservation that is a Capacity Block. So many minutes before its end EC2 begins to terminate its
# instances, and so many minutes before that it warns.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-monitor.html
CAPACITY_BLOCK, BLOCK_TERMINATES_MINUTES, BLOCK_WARNS_MINUTES = "capacity-block", 30, 10
# Dimension of the head's metrics of a kind of worker other than these two, whose metrics have none.
KIND_DIMENSION = "Workers"
# Metrics by which a head that sleeps while it is idle is put to sleep and woken: its idle time in minutes, which it
# publishes, and a request for it, which users publish. The variable of the head's container has the idle time.
HEAD_IDLE, HEAD_REQUESTED = "HeadIdleMinutes", "HeadRequested"
SLEEP_VARIABLE = "SLEEP_AFTER_MINUTES"


# Hours of a month, as AWS's price lists count them.
HOURS_OF_MONTH = 730


def per_hour_and_month(usd: float) -> str:
    """Return a cost in USD per hour in words, also of a month: `0.30 USD an hour (216 a month)`."""
    return f"{usd:.2f} USD an hour ({usd * HOURS_OF_MONTH:,.0f} a month)"


def reservation_name(reservation_id: str, *, is_block: bool) -> str:
    """Return a capacity reservation in words: `Capacity Block cr-0123456789abcdef0`."""
    return f"{'Capacity Block' if is_block else 'capacity reservation'} {reservation_id}"


def label_of_pool(pool: str) -> str:
    """Return the label NODE_GROUP_LABEL of a pool's nodes; empty if they don't have it."""
    return {DEFAULT_POOL: "", CPU_POOL: CPU_WORKERS}.get(pool, pool)


def field_of(pool: str, key: str) -> str:
    """Return the field of the stack's arguments that is a pool's key, e.g. worker_pools.h100.max for `max`."""
    own = SETTINGS.get(pool)
    return own.get(key, SETTINGS[DEFAULT_POOL][key]) if own else f"worker_pools.{pool}.{key}"


def key_of(field: str) -> str:
    """Return the configuration key of a field, in camel case."""
    first, *others = field.split("_")
    return first + "".join(word[:1].upper() + word[1:] for word in others)


# Step adjustments of a scaling policy.
# https://docs.aws.amazon.com/autoscaling/application/userguide/application-auto-scaling-limits.html
MAX_STEPS = 20


def scale_out_stride(max_count: int) -> int:
    """Return the stride of the numbers of workers to scale out to: a policy has a step for each of them."""
    return max(1, -(-max_count // MAX_STEPS))


def secrets_prefix(cluster_name: str) -> str:
    """Return the prefix of the SSM parameters with the secrets of a cluster's runs."""
    return f"/ray-on-ecs/{cluster_name}/runs"
