"""Fixed ports of a node's servers; docs/image.md lists them."""

from ray_on_ecs.contract import DASHBOARD_PORT

GCS = 6379
DASHBOARD = DASHBOARD_PORT
CLIENT = 10001
AGENT = 6384

# As flags of `ray start`. The Ray Client server can't be disabled; like all the others it requires the token.
HEAD = {"--port": GCS, "--dashboard-port": DASHBOARD, "--ray-client-server-port": CLIENT}
NODE = {
    "--node-manager-port": 6380,
    "--object-manager-port": 6381,
    "--runtime-env-agent-port": 6382,
    "--dashboard-agent-grpc-port": 6383,
    # Not Ray's default, 52365: an ephemeral port, which a connection may hold before the agent starts.
    "--dashboard-agent-listen-port": AGENT,
    "--metrics-export-port": 8080,
    "--min-worker-port": 10002,
    "--max-worker-port": 10999,
}

# Ray's Prometheus servers don't check the token, so they are off; RAY_enable_metrics_collection=true enables a node's.
METRICS = {
    "RAY_enable_metrics_collection": "false",
    # These two can't be disabled, but Ray runs without a server whose port can't be bound.
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}


def flags(ports: dict[str, int]) -> list[str]:
    """Return the ports as arguments of `ray start`."""
    return [f"{name}={port}" for name, port in ports.items()]
