"""FSx, EFS and their network interfaces, as boto3 answers about existing file systems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from botocore.exceptions import ClientError

LUSTRE, EFS, VPC = "fs-0a0b0c0d", "fs-0e0f0a0b", "vpc-0a1b"
GOOD: dict[str, Any] = {
    "fsx": {
        "FileSystemType": "LUSTRE",
        "Lifecycle": "AVAILABLE",
        "VpcId": VPC,
        "DNSName": f"{LUSTRE}.fsx.us-west-2.amazonaws.com",
        "LustreConfiguration": {"MountName": "abcdefgh"},
        "NetworkInterfaceIds": ["eni-fsx"],
    },
    "efs": {"LifeCycleState": "available"},
    "targets": [
        {
            "NetworkInterfaceId": "eni-efs",
            "AvailabilityZoneName": "us-west-2b",
            "VpcId": VPC,
            "LifeCycleState": "available",
        }
    ],
    "interfaces": [
        {"NetworkInterfaceId": name, "AvailabilityZone": "us-west-2b", "Groups": [{"GroupId": f"sg-{name[4:]}"}]}
        for name in ("eni-fsx", "eni-efs")
    ],
}


@dataclass
class FakeFileSystems:
    """Answers of all three services, with the changes of `answers`; a text is the code of an error."""

    answers: dict[str, Any] = field(default_factory=dict)

    def client(self, service: str, region: str) -> Any:
        """Return the client of a service."""
        return _Client(service, {**GOOD, **self.answers})


@dataclass
class _Client:
    service: str
    answers: dict[str, Any]

    def describe_file_systems(self, **asked: Any) -> dict[str, Any]:
        """Answer as FSx and EFS do."""
        return {"FileSystems": [self._answer(self.service, lambda answer: {**GOOD[self.service], **answer})]}

    def get_paginator(self, call: str) -> Any:
        """Paginator of a call with one page."""
        return SimpleNamespace(paginate=lambda: [{"FileSystems": self.answers.get("made", [])}])

    def describe_mount_targets(self, **asked: Any) -> dict[str, Any]:
        """Answer as EFS does."""
        return {"MountTargets": self._answer("targets", list)}

    def describe_network_interfaces(self, NetworkInterfaceIds: list[str]) -> dict[str, Any]:
        """Answer as EC2 does."""
        found = self._answer("interfaces", list)
        return {"NetworkInterfaces": [each for each in found if each["NetworkInterfaceId"] in NetworkInterfaceIds]}

    def _answer(self, name: str, made: Callable[[Any], Any]) -> Any:
        answer = self.answers[name]
        if isinstance(answer, str):
            raise ClientError({"Error": {"Code": answer, "Message": "said AWS"}}, name)
        return made(answer)
