"""Names and numbers on which the stack (infra/) and this package agree: container, variables, labels, quotas.

This module imports nothing, and infra/ imports no other one of this package.
"""

# The head's container on its instance: ECS's agent labels what it starts, while Docker's names carry a random suffix.
HEAD = "ray-head"
HEAD_CONTAINER = f"sudo docker ps -qf label=com.amazonaws.ecs.container-name={HEAD} -f health=healthy"
# Ray's dashboard, with the Jobs API.
DASHBOARD_PORT = 8265
DASHBOARD_URL = f"http://127.0.0.1:{DASHBOARD_PORT}"  # on the head itself

# Jupyter, on the head or on a worker: a port that no server of a node has (docs/image.md).
NOTEBOOK_PORT = 8888

# Prefix of the runs in the stack's bucket.
RUNS_PREFIX = "runs"
# Seconds that a run waits for its workers: an instance that is started for it takes up to ten minutes, and longer where
# GPUs are scarce.
WORKER_TIMEOUT = 1800

# Environment variables of the containers: CloudWatch's namespace of the stack's own metrics; `true` where there can be
# CPU workers; the folder of the head's state; the SSM parameter that describes the workers; the head's DNS name;
# the file in which an instance says what it is; and what the SSM parameters with the secrets of runs begin with.
CLOUDWATCH_NAMESPACE_VARIABLE = "CLOUDWATCH_NAMESPACE"
CPU_WORKERS_VARIABLE = "CPU_WORKERS"
HEAD_STATE_VARIABLE = "RAY_HEAD_STATE"
CLUSTER_INFO_VARIABLE = "CLUSTER_INFO"
HEAD_HOST_VARIABLE = "RAY_HEAD_HOST"
INSTANCE_FILE_VARIABLE = "INSTANCE_FILE"
SECRETS_VARIABLE = "SECRETS_PREFIX"

# EC2's markets, as its instance metadata names them.
SPOT, ON_DEMAND = "spot", "on-demand"
# Labels of a worker's Ray node, by the keys of the file in which its instance says what it is. Ray itself has names for
# zone, market and group, and takes the group from RAY_NODE_TYPE_NAME.
# https://docs.ray.io/en/latest/ray-core/scheduling/labels.html
INSTANCE_LABELS = {
    "instance_type": "instance-type",
    "zone": "ray.io/availability-zone",
    "market": "ray.io/market-type",
}
# Another key of that file.
INSTANCE_ID = "instance_id"
NODE_GROUP_LABEL, NODE_GROUP_VARIABLE = "ray.io/node-group", "RAY_NODE_TYPE_NAME"
# The group of the CPU workers; those that train have none.
CPU_WORKERS = "cpu-workers"

# EC2's quotas of running vCPUs: Service Quotas' code and name, the instance families that it counts, and their market.
STANDARD_FAMILIES = "a|c|d|h|i|im|is|m|r|t|z"
VCPU_QUOTAS = (
    ("L-DB2E81BA", "Running On-Demand G and VT instances", "g|gr|vt", ON_DEMAND),
    ("L-417A185B", "Running On-Demand P instances", "p", ON_DEMAND),
    (
        "L-1216C47A",
        "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
        STANDARD_FAMILIES,
        ON_DEMAND,
    ),
    ("L-3819A6DF", "All G and VT Spot Instance Requests", "g|gr|vt", SPOT),
    ("L-C4BD4855", "All P5 Spot Instance Requests", "p(?=5)", SPOT),
    ("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests", "p(?=[234])", SPOT),
    (
        "L-34B43A08",
        "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests",
        STANDARD_FAMILIES,
        SPOT,
    ),
)


def secrets_prefix(cluster_name: str) -> str:
    """Return what the SSM parameters with the secrets of a cluster's runs begin with."""
    return f"/ray-on-ecs/{cluster_name}/runs"
