"""Every port that a node listens on, fixed; docs/image.md says what answers there."""

GCS = 6379
DASHBOARD = 8265
CLIENT = 10001
AGENT = 6384

# As flags of `ray start`. The client server can't be left out; like all the others it wants the token.
HEAD = {"--port": GCS, "--dashboard-port": DASHBOARD, "--ray-client-server-port": CLIENT}
NODE = {
    "--node-manager-port": 6380,
    "--object-manager-port": 6381,
    "--runtime-env-agent-port": 6382,
    "--dashboard-agent-grpc-port": 6383,
    # Not Ray's 52365: the kernel may have given that to a connection before the agent starts.
    "--dashboard-agent-listen-port": AGENT,
    "--metrics-export-port": 8080,
    "--min-worker-port": 10002,
    "--max-worker-port": 10999,
}

# Ray's Prometheus servers know no token, so they stay shut; RAY_enable_metrics_collection=true opens a node's own.
METRICS = {
    "RAY_enable_metrics_collection": "false",
    # These two have no switch; Ray goes on without a server whose port can't be bound.
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}


def flags(ports: dict[str, int]) -> list[str]:
    """The ports as arguments of `ray start`."""
    return [f"{name}={port}" for name, port in ports.items()]
