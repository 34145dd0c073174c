"""Stand-in for EC2 with one Capacity Block, which moto does not have."""

from __future__ import annotations

import re
import threading
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, cast

BLOCK_ID = "cr-0123456789abcdef0"
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeCapacityReservations.html
ANSWER = """<DescribeCapacityReservationsResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">
<requestId>1</requestId><capacityReservationSet><item><capacityReservationId>{id}</capacityReservationId>
<instanceType>p5.48xlarge</instanceType><availabilityZone>us-west-2c</availabilityZone><state>active</state>
<totalInstanceCount>2</totalInstanceCount><availableInstanceCount>{free}</availableInstanceCount>
<reservationType>{kind}</reservationType>{owner}{times}</item></capacityReservationSet></DescribeCapacityReservationsResponse>"""
ERROR = "<Response><Errors><Error><Code>{}</Code><Message>as the test wants it</Message></Error></Errors></Response>"


def answer(end: datetime | None = None, *, free: int = 0, owner: str = "") -> str:
    """EC2's answer for a Capacity Block that ends at this time, or without one for a reservation on demand."""
    owner = f"<ownerId>{owner}</ownerId>" if owner else ""
    start = datetime(2026, 1, 1) if end is None else end - timedelta(days=1)
    times = f"<startDate>{start:%Y-%m-%dT%H:%M:%SZ}</startDate>"
    times += f"<endDate>{end:%Y-%m-%dT%H:%M:%SZ}</endDate>" if end else ""
    return ANSWER.format(id=BLOCK_ID, free=free, kind="capacity-block" if end else "default", owner=owner, times=times)


class Ec2(HTTPServer):
    """EC2 whose Capacity Block ends at `end`; or it answers with the code `error`."""

    def __init__(self, end: datetime) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.end, self.error, self.asked = end, "", 0
        self.askers: set[str] = set()  # their access keys
        self.answers = threading.Event()  # not set while it is silent
        self.answers.set()

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that lead to it."""
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-west-2"}
        return {
            **keys,
            "AWS_DEFAULT_REGION": "us-west-2",
            "AWS_ENDPOINT_URL_EC2": f"http://127.0.0.1:{self.server_port}",
        }


class Handler(BaseHTTPRequestHandler):
    """Answers as EC2 does."""

    def do_POST(self) -> None:
        ec2 = cast(Ec2, self.server)
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        assert f"CapacityReservationId.1={BLOCK_ID}" in asked, asked
        ec2.asked += 1
        ec2.askers |= {*re.findall("Credential=([^/]+)", self.headers["Authorization"])}
        ec2.answers.wait()
        text = ERROR.format(ec2.error) if ec2.error else answer(ec2.end)
        self.send_response(400 if ec2.error else 200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the tests say what went wrong."""
