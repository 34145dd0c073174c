"""Price List queries, their answers, and missing prices."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from botocore.parsers import ResponseParserError
from botocore.stub import ANY, Stubber

from infra.config import prices
from infra.types import Price
from tests.infra.fake_aws import REGION, Cloud, node_spec, on_demand

QUESTION = {
    "ServiceCode": "AmazonEC2",
    "Filters": [
        {"Type": "TERM_MATCH", "Field": field, "Value": value}
        for field, value in {
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
            "marketoption": "OnDemand",
            "instanceType": "g5.xlarge",
            "regionCode": REGION,
        }.items()
    ],
}
WORKER = node_spec()
RESERVED_ONLY = json.dumps({"terms": {"Reserved": {}}})


def answering(*products: str) -> Any:
    """A client of the price list as boto3 makes it, which holds question and answer against AWS's own model."""
    client = boto3.client("pricing", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    stub = Stubber(client)
    stub.add_response("get_products", {"PriceList": list(products)}, QUESTION)
    stub.activate()
    return client


def test_price_filters_select_on_demand_linux() -> None:
    assert prices.hourly_usd(answering(on_demand(1.006)), REGION, "g5.xlarge") == 1.006


def test_products_without_on_demand_offer_have_no_price() -> None:
    assert prices.hourly_usd(answering(RESERVED_ONLY, on_demand(1.006)), REGION, "g5.xlarge") == 1.006


@pytest.mark.parametrize(
    "products", [(), (RESERVED_ONLY,), (on_demand(1.0), on_demand(2.0))], ids=["none", "reserved", "two"]
)
def test_no_price_or_two_are_no_estimate(
    products: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    monkeypatch.setattr(prices, "client", lambda service, region: answering(*products))
    assert prices.look_up(REGION, WORKER) == [WORKER]
    assert "prices of g5.xlarge in us-west-2" in warnings[0]


@pytest.mark.parametrize(
    "failure",
    [
        ClientError({"Error": {"Code": "AccessDeniedException", "Message": "not authorized"}}, "GetProducts"),
        EndpointConnectionError(endpoint_url="https://api.pricing.us-east-1.amazonaws.com"),
        ResponseParserError("Unable to parse response: <html>"),  # the page of a proxy
        KeyError("OnDemand"),
        ValueError("Expecting value: line 1"),
        FileNotFoundError(2, "No such file or directory", "/opt/team/credentials"),
        RuntimeError("Credentials were refreshed, but the refreshed credentials are still expired."),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_prices_that_cannot_be_read_are_one_warning(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    def fail(**asked: Any) -> Any:
        raise failure

    silent = SimpleNamespace(get_products=fail, describe_spot_price_history=fail)
    monkeypatch.setattr(prices, "client", lambda service, region: silent)
    assert prices.look_up(REGION, WORKER) == [WORKER]
    monkeypatch.setattr(prices, "hourly_usd", lambda client, region, name: 1.0)
    [node] = prices.look_up(REGION, node_spec(spot_count=1))
    assert node.prices == {"g5.xlarge": Price(on_demand=1.0, spot=None)}
    assert [line.split(" (")[0] for line in warnings] == [
        "cost estimate is not available",
        "spot prices are not available",
    ]


def test_missing_credentials_are_no_traceback(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody-has-this-profile")
    assert prices.look_up(REGION, WORKER) == [WORKER]
    assert "nobody-has-this-profile" in warnings[0]


def test_the_list_is_asked_where_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    client = prices.client("pricing", prices.PRICE_LIST_REGION)
    assert client.meta.endpoint_url == "https://api.pricing.us-east-1.amazonaws.com"


@pytest.mark.parametrize(("usd", "limit"), [(None, 0.0), (2.5, 0.0), (2.5, 5.0)])
def test_cost_limit_accepts_equal_and_disabled(usd: float | None, limit: float) -> None:
    prices.check(limit, node_spec(usd=usd))


def test_spot_price_is_highest_current_price_of_zones() -> None:
    client = boto3.client("ec2", region_name=REGION, aws_access_key_id="x", aws_secret_access_key="x")
    stub = Stubber(client)
    history = [
        {"InstanceType": name, "AvailabilityZone": zone, "SpotPrice": price}
        for name, zone, price in (("g5.xlarge", "a", "0.39"), ("g5.xlarge", "b", "0.41"), ("g6.xlarge", "a", "0.3"))
    ]
    asked = {
        "InstanceTypes": ["g5.xlarge", "g6.xlarge", "p5.48xlarge"],
        "ProductDescriptions": ["Linux/UNIX"],
        "Filters": [{"Name": "availability-zone", "Values": ["a", "b"]}],
        "StartTime": ANY,
    }
    stub.add_response("describe_spot_price_history", {"SpotPriceHistory": history}, asked)
    with stub:
        spot_prices = prices.spot_usd(client, asked["InstanceTypes"], ("a", "b"))
    assert spot_prices == {"g5.xlarge": 0.41, "g6.xlarge": 0.3}


def test_estimate_uses_highest_price_per_market() -> None:
    two = {"g5.xlarge": Price(on_demand=1.0, spot=0.4), "g6.xlarge": Price(on_demand=0.8, spot=None)}
    node = replace(node_spec(count=3, spot_count=2), prices=two)
    assert prices.estimate(node) == 1.0 + 2 * 0.8
    assert prices.estimate(node, node_spec()) is None


FAST = replace(WORKER, instances=(replace(WORKER.instances[0], disk_mb=437.5),))


def test_disk_price_is_in_both_prices_of_a_node(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prices, "client", lambda service, region: cloud)
    slow, fast = prices.look_up(REGION, WORKER, replace(FAST, spot_count=1))
    assert (slow.prices, slow.disk_usd) == ({"g5.xlarge": Price(on_demand=1.006)}, 0)
    assert (fast.prices, fast.disk_usd) == ({"g5.xlarge": Price(on_demand=1.022, spot=0.416)}, 0.016)


@pytest.mark.parametrize("product", [None, on_demand(0.04, "MiBps-mo")], ids=["none", "of another unit"])
def test_unknown_disk_price_is_a_warning(
    product: str | None, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    cloud.disk_price = None
    if product:
        monkeypatch.setattr("tests.infra.fake_aws.on_demand", lambda *given: product)
        cloud.disk_price, cloud.prices = 1.0, {}
        monkeypatch.setattr(prices, "hourly_usd", lambda client, region, name: 1.006)
    monkeypatch.setattr(prices, "client", lambda service, region: cloud)
    [node] = prices.look_up(REGION, FAST)
    assert (node.prices, node.disk_usd) == ({"g5.xlarge": Price(on_demand=1.006)}, 0)
    [line] = warnings
    assert line.startswith("the cost estimate is without the disks' throughput (pricing:GetProducts: 0 prices of Prov")


@pytest.mark.parametrize("others", [1, prices.BURST])
def test_a_type_without_a_price_leaves_those_after_it_theirs(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    names = [f"a{number}.large" for number in range(others)]
    cloud.prices = dict.fromkeys([*names[1:], "g5.xlarge"], 1.0)
    monkeypatch.setattr(prices, "client", lambda service, region: cloud)
    *priced, last = prices.look_up(REGION, *map(node_spec, names), WORKER)
    assert [bool(node.prices) for node in priced] == [False] + [True] * (others - 1)
    assert last.prices == {"g5.xlarge": Price(on_demand=1.0)}


@pytest.mark.parametrize(("count", "at_once"), [(prices.BURST, prices.BURST), (prices.BURST + 1, 1)])
def test_the_list_is_asked_at_once_as_far_as_it_answers(count: int, at_once: int) -> None:
    meeting, threads = threading.Barrier(at_once), set()

    def ask(usd: float) -> float:
        meeting.wait(60)
        threads.add(threading.get_ident())
        return usd

    answers = list(prices._usd([partial(ask, float(number)) for number in range(count)]))
    assert answers == [float(number) for number in range(count)]
    assert (threading.get_ident() in threads) == (at_once == 1)
