"""Build of the image in AWS CodeBuild: `pulumi up` starts it, or finds it under way, and follows it to its end."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pulumi

from infra.config.clients import ERRORS
from infra.config.code_build import PATIENCE_SECONDS, POLL_SECONDS, RESTORE, ask, call, check
from infra.definitions.build_context import BuildContext
from infra.definitions.policies import ECR_IMAGE
from infra.errors import Refusal, error_reason, warn
from infra.image import OUTPUT
from infra.types import Location

# Of a first build; with a cache it takes one or two. https://aws.amazon.com/codebuild/pricing/
MINUTES, USD = 8, 0.16
# Builds in a row that end before their first command, as with a role that is seconds old.
MOST_STARTS = 3
LOG_LINES = 20
# Reasons of a build whose role has lost its trust policy or a right.
OF_ROLE = "(?i)sts:AssumeRole|unable to assume role|role .*does not allow|not authorized to perform"
CONSOLES = {"aws-cn": "console.amazonaws.cn", "aws-us-gov": "console.amazonaws-us-gov.com"}
ENDS = {"FAULT": "ended by a fault of CodeBuild", "TIMED_OUT": "took too long", "STOPPED": "was stopped"}


@dataclass(frozen=True, kw_only=True)
class ImageBuild:
    """Build of a context; CodeBuild is asked about the caller's rights by `project` while it has no project."""

    context: BuildContext
    location: Location
    project: str

    @property
    def region(self) -> str:
        """Region of the stack."""
        return self.location.region

    async def image_uri(self, names: Any) -> Any:
        """URI of the image by its digest: the one in the repository, or else a new one; pulumi.UNKNOWN in a preview.

        `names` has `repository` (URL), `project`, `bucket` and `key` (prefix of the source); a preview may lack some.
        """
        known = names if isinstance(names, Mapping) else {}
        missing = [key for key in ("repository", "project", "bucket", "key") if not isinstance(known.get(key), str)]
        preview, digest, problem = pulumi.runtime.is_dry_run(), "", None
        if "repository" not in missing:
            try:
                digest = await self._digest(known["repository"], patience=0 if preview else PATIENCE_SECONDS)
            except Refusal as refusal:
                problem = refusal
        if digest:
            return f"{known['repository']}@{digest}"
        if missing and not preview:
            return pulumi.UNKNOWN  # an update of other resources alone
        # First, since another account's credentials may be the problem.
        project = self.project if "project" in missing else known["project"]
        is_new = "repository" in missing
        await check(self.location, project, needs_rights=is_new or not preview)
        if problem and not preview:
            raise problem
        if not preview:
            return f"{known['repository']}@{await self._build(known)}"
        if problem:
            warn(str(problem))
        pulumi.log.info(f"image: CodeBuild builds it in `pulumi up`, some {MINUTES} minutes, about {USD} USD")
        return pulumi.UNKNOWN

    async def _build(self, names: Mapping[str, str]) -> str:
        """Digest of the image after the build."""
        build = await self._under_way(names["project"])
        if not build and (digest := await self._digest(names["repository"])):  # ended since the first look
            return digest
        starts = 0
        while True:
            ended = await self._follow(build or await self._start(names))
            starts += 1
            if starts == MOST_STARTS or not _ended_early(ended):
                break
            build = None
            await asyncio.sleep(3 * POLL_SECONDS)
        with suppress(*ERRORS):  # a new source takes its place
            await call("s3:DeleteObject", self.region, Bucket=names["bucket"], Key=self._key(names))
        if ended["buildStatus"] != "SUCCEEDED":
            raise pulumi.RunError(await self._failure(ended))
        for _ in range(6):
            if digest := await self._digest(names["repository"]):
                return digest
            await asyncio.sleep(POLL_SECONDS)
        raise Refusal(
            "image",
            f"the build succeeded, but {names['repository']} has no image {self.context.tag}; see {self._link(ended)}, "
            "and `pulumi up` again",
        )

    async def _digest(self, repository: str, patience: float = PATIENCE_SECONDS) -> str:
        """Digest of the context's image in the repository, or empty."""
        image = ECR_IMAGE.match(repository)
        if not image:
            raise Refusal("image", f"{repository} is not a repository of ECR")
        place: dict[str, Any] = {"registryId": image["account"], "repositoryName": image["name"]}
        tag, absent = [{"imageTag": self.context.tag}], "ImageNotFoundException"
        answer = await ask("ecr:DescribeImages", self.region, patience=patience, absent=absent, imageIds=tag, **place)
        return answer["imageDetails"][0]["imageDigest"] if answer else ""

    async def _under_way(self, project: str) -> dict[str, Any] | None:
        """Build of the same context that is under way: its `up` was interrupted, or lost the answer to its start."""
        answer = await ask("codebuild:ListBuildsForProject", self.region, projectName=project, sortOrder="DESCENDING")
        ids = answer["ids"][:100]
        builds = (await ask("codebuild:BatchGetBuilds", self.region, ids=ids))["builds"] if ids else []
        for build in builds:
            variables = build.get("environment", {}).get("environmentVariables", [])
            has_tag = any(each["name"] == "TAG" and each["value"] == self.context.tag for each in variables)
            if build["buildStatus"] == "IN_PROGRESS" and has_tag:
                pulumi.log.info(f"image: CodeBuild is at it since {build['startTime']:%H:%M}: {self._link(build)}")
                return build
        return None

    async def _start(self, names: Mapping[str, str]) -> dict[str, Any]:
        source, key = self.context.zip(), self._key(names)
        await ask("s3:PutObject", self.region, Bucket=names["bucket"], Key=key, Body=source)
        variables = {
            "SOURCE": f"s3://{names['bucket']}/{key}",
            "SHA256": hashlib.sha256(source).hexdigest(),
            "REPOSITORY": names["repository"],
            "TAG": self.context.tag,
            "OUTPUT": OUTPUT,
        }
        answer = await ask(
            "codebuild:StartBuild",
            self.region,
            projectName=names["project"],
            # Of a repeated call CodeBuild returns the same build.
            idempotencyToken=uuid.uuid4().hex,
            environmentVariablesOverride=[{"name": name, "value": value} for name, value in variables.items()],
        )
        pulumi.log.info(f"image: CodeBuild builds it, some {MINUTES} minutes: {self._link(answer['build'])}")
        return answer["build"]

    async def _follow(self, build: dict[str, Any]) -> dict[str, Any]:
        """Wait for the end of a build, and show its phase and its newest line."""
        began = seen = time.monotonic()
        shown = ""
        while build["buildStatus"] == "IN_PROGRESS":
            await asyncio.sleep(POLL_SECONDS)
            answer = await ask("codebuild:BatchGetBuilds", self.region, is_under_way=True, ids=[build["id"]])
            if answer["builds"]:
                build, seen = answer["builds"][0], time.monotonic()
            elif time.monotonic() - seen > PATIENCE_SECONDS:  # also a new build may be missing at first
                raise Refusal("image", f"CodeBuild no longer knows its build {self._link(build)}; `pulumi up` again")
            minutes, seconds = divmod(int(time.monotonic() - began), 60)
            lines, _ = await self._log(build, 1)
            line = f"{build.get('currentPhase', 'QUEUED').lower()}{''.join(f': {each[:150]}' for each in lines)}"
            if line != shown:
                pulumi.log.info(f"image: {minutes}:{seconds:02} {line}", ephemeral=True)
                shown = line
        return build

    async def _log(self, build: Mapping[str, Any], count: int) -> tuple[list[str], str]:
        """Last lines of a build's log, and the reason why there are none."""
        place = build.get("logs", {})
        if not (place.get("groupName") and place.get("streamName")):
            return [], "it has no log"
        stream = {"logGroupName": place["groupName"], "logStreamName": place["streamName"]}
        try:
            answer = await call("logs:GetLogEvents", self.region, **stream, limit=count, startFromHead=False)
        except ERRORS as error:
            return [], f"its log could not be read (logs:GetLogEvents: {error_reason(error)})"
        # Without the sequences that move a terminal's cursor.
        sequences = r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]"
        texts = [re.sub(sequences, "", each["message"]) for each in answer["events"]]
        return [text.rstrip() for text in texts if text.strip()][-count:], "its log is empty"

    async def _failure(self, build: Mapping[str, Any]) -> str:
        """Message with phase, reason, last lines of the log and link."""
        phases = [each for each in build.get("phases", ()) if each.get("phaseStatus", "SUCCEEDED") != "SUCCEEDED"]
        reasons = [
            f"{context.get('statusCode', '')}: {context['message']}"
            for phase in phases
            for context in phase.get("contexts", ())
            if context.get("message")
        ]
        where = f" in {phases[0]['phaseType']}" if phases else ""
        why = f" ({reasons[0]})" if reasons else ""
        await asyncio.sleep(POLL_SECONDS)  # the last lines arrive after the end
        lines, missing = await self._log(build, LOG_LINES)
        remedy = f"{RESTORE} its role" if re.search(OF_ROLE, why) else "`pulumi up` starts another"
        head = f"image: the build {ENDS.get(build['buildStatus'], 'failed')}{where}{why}; {remedy}"
        return "\n".join([head, *(lines or [missing]), self._link(build)])

    def _key(self, names: Mapping[str, str]) -> str:
        return f"{names['key']}{self.context.tag}.zip"

    def _link(self, build: Mapping[str, Any]) -> str:
        """Build's page in the console."""
        project, partition = build["id"].rpartition(":")[0], build["arn"].split(":")[1]
        console = CONSOLES.get(partition, "console.aws.amazon.com")
        page = f"codesuite/codebuild/projects/{project}/build/{quote(build['id'], safe='')}"
        return f"https://{console}/{page}?region={self.region}"


def _ended_early(build: Mapping[str, Any]) -> bool:
    """True for a build that failed before its first command; neither Dockerfile nor code is to blame."""
    reached = {phase["phaseType"] for phase in build.get("phases", ())}
    return build["buildStatus"] in ("FAILED", "FAULT") and not reached & {"INSTALL", "PRE_BUILD", "BUILD"}
