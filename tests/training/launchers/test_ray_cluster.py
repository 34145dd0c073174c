import psutil
import pytest
from ray.exceptions import AuthenticationError
from rich.console import Console

from training.errors import ResourceError, UsageError
from training.launchers import network_interface, ray_cluster
from training.launchers.ray_cluster import WorkerAllocation, allocate_workers
from training.recipes.images.config import ImageConfig

HEAD = {"CPU": 0.0, "memory": 1e9}
G5_XLARGE = {"CPU": 4.0, "GPU": 1.0}
G5_12XLARGE = {"CPU": 48.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("nodes", "settings", "expected"),
    [
        ([HEAD, G5_XLARGE, G5_XLARGE], {}, WorkerAllocation(2, True, 4)),
        ([HEAD, G5_12XLARGE], {}, WorkerAllocation(4, True, 12)),
        ([HEAD, G5_12XLARGE], {"num_workers": 2}, WorkerAllocation(2, True, 24)),
        ([HEAD, G5_XLARGE, G5_XLARGE], {"device": "cpu"}, WorkerAllocation(2, False, 4)),
        ([{"CPU": 8.0}], {}, WorkerAllocation(2, False, 4)),
        ([{"CPU": 3.0}, {"CPU": 3.0}], {"num_workers": 3}, WorkerAllocation(3, False, 1)),
        ([HEAD, G5_XLARGE], {"num_workers": "1:4"}, WorkerAllocation(1, True, 4, (1, 4))),
        ([HEAD, G5_12XLARGE, G5_12XLARGE], {"num_workers": "1:4"}, WorkerAllocation(4, True, 24, (1, 4))),
        ([HEAD, G5_XLARGE], {"num_workers": "2:4"}, None),
        ([HEAD], {}, None),
        ([HEAD, G5_XLARGE], {"num_workers": 2}, None),
        ([HEAD, {"CPU": 8.0}], {"device": "cuda"}, None),
        ([], {}, None),
    ],
)
def test_workers_get_the_most_cpus_with_which_all_fit(
    nodes: list[dict[str, float]], settings: dict[str, object], expected: WorkerAllocation | None
) -> None:
    assert allocate_workers(ImageConfig(**settings), nodes) == expected  # ty: ignore[invalid-argument-type]


def test_the_interface_is_the_one_that_leads_to_the_head() -> None:
    assert network_interface.interface_towards("127.0.0.1") == _loopback(), "the route decides, not the name"
    assert network_interface.interface_towards("no-such-host.invalid") is None, "no route is no interface"


def _loopback() -> str:
    return next(name for name, found in psutil.net_if_addrs().items() if "127.0.0.1" in [a.address for a in found])


@pytest.fixture
def head_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        gcs_address = "127.0.0.1:6379"

    monkeypatch.setattr(network_interface.ray, "get_runtime_context", Context)
    for name in network_interface.VARIABLES:
        monkeypatch.setenv(name, "")  # so that what the code sets is taken back after the test
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("head_on_loopback")
def test_nccl_and_gloo_are_pointed_at_that_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_interface, "interface_towards", lambda host: {"127.0.0.1": "eth7"}[host])
    network_interface.use_route_to_head()
    assert network_interface.os.environ["NCCL_SOCKET_IFNAME"] == "=eth7", "without '=' NCCL would take eth70 as well"
    assert network_interface.os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.usefixtures("head_on_loopback")
def test_an_interface_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    network_interface.use_route_to_head()
    assert network_interface.os.environ["NCCL_SOCKET_IFNAME"] == "mine"


@pytest.mark.parametrize("address", ["auto", "local"])
def test_a_cluster_that_refuses_the_token_is_named(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    def refuse(**options: object) -> None:
        raise AuthenticationError("Authentication token is missing or incorrect")

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # so that what the code sets is taken back
    monkeypatch.setattr(ray_cluster.ray, "init", refuse)
    with pytest.raises(UsageError, match="RAY_AUTH_TOKEN"):
        ray_cluster.connect(ImageConfig(), {})


def refuse_to_ask(bundles: list[dict[str, float]]) -> None:
    raise AssertionError(f"instances would be started for {bundles}")


def test_where_there_is_room_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "placement_group", refuse_to_ask)
    monkeypatch.setattr(ray_cluster, "_nodes", lambda: [HEAD, G5_XLARGE])
    assert ray_cluster.wait_for_workers(ImageConfig(), 60, Console()) == WorkerAllocation(1, True, 4)


def test_without_a_wait_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "placement_group", refuse_to_ask)
    monkeypatch.setattr(ray_cluster, "_nodes", lambda: [HEAD])
    with pytest.raises(ResourceError):
        ray_cluster.wait_for_workers(ImageConfig(), 0, Console())
