"""Checks of the Ray head, its nodes and the storage, for `ray-on-ecs doctor`."""

from __future__ import annotations

import importlib.metadata
import time

import requests

from ray_on_ecs.cli.findings import ANSWER_SECONDS, UP, Findings, Notice, Problem
from ray_on_ecs.cluster.clusters import COMPOSE_S3, choose
from ray_on_ecs.cluster.head import ALIVE
from ray_on_ecs.errors import one_line
from ray_on_ecs.node.labels import fingerprint

EXITED_SECONDS = 3600


def ray_on_this_machine(findings: Findings) -> str:
    """Connect to the head of --local or --compose."""
    findings.cluster = choose(**findings.flags)
    return ray(findings)


def ray(findings: Findings) -> str:
    """Connect to the head."""
    head = findings.head = findings.connections.enter_context(findings.cluster.connect())
    return f"answers at {head.url}" + (", and accepts the token" if head.token else "")


def version(findings: Findings) -> str:
    """Compare the versions of Ray."""
    remote, local = findings.head.get("/api/version", "ray_version"), importlib.metadata.version("ray")
    if remote != local:
        raise Notice(f"Ray {remote} on the cluster, Ray {local} here", f"pip install 'ray[default]=={remote}'")
    return f"Ray {remote} on the cluster and here"


def nodes(findings: Findings) -> str:
    """Look for nodes that died or are missing."""
    listed = findings.head.nodes()
    alive = [node for node in listed if node["state"] == ALIVE]
    line = f"{len(alive) - 1} and the head"
    now = findings.head.clock() or time.time()
    dead = [node for node in listed if node["state"] != ALIVE and now - node["end_time_ms"] / 1000 < EXITED_SECONDS]
    failed = [node for node in dead if "unexpected" in (node["state_message"] or "").lower()]
    if failed:
        reason = one_line(failed[-1]["state_message"])
        raise Notice(f"{line}; {len(failed)} ended unexpectedly within an hour, the last one: {reason}")
    expected = sum(number for kind, number in findings.running.items() if kind != "head")
    if expected > len(alive) - 1:
        raise Notice(f"{line}, and ECS runs {expected} tasks of them: they are starting, or have not joined Ray")
    return f"{line}; {len(dead)} have left within an hour" if dead else line


def code(findings: Findings) -> str:
    """Compare the code of the image with this package."""
    remote, local = findings.head.code(), fingerprint()
    build = "docker compose --file docker/compose.yaml up --build --detach" if findings.flags["compose"] else UP
    if remote != local:
        raise Notice(f"the code in the image ({remote}) differs from the code here ({local})", build)
    return f"the code in the image is the code here ({local})"


def storage(findings: Findings) -> str:
    """Write to the storage path."""
    if findings.flags["compose"]:
        try:
            requests.head(COMPOSE_S3, timeout=ANSWER_SECONDS)
        except requests.RequestException as cause:
            fix = "docker compose --file docker/compose.yaml up --detach"
            raise Problem(f"compose's S3 does not answer at {COMPOSE_S3}", fix) from cause
    findings.cluster.storage("doctor").check_writable()
    return f"{findings.cluster.storage_path} can be written"
