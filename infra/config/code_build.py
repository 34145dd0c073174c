"""Pre-flight check of CodeBuild for a new cluster: where it is forbidden, `pulumi up` would leave half of the stack."""

from __future__ import annotations

from botocore.exceptions import BotoCoreError, ClientError

from infra.config.clients import client
from infra.errors import DENIED, SettingError, error_reason, warn

ACTION = "codebuild:BatchGetProjects"
HINT = "allow the caller CodeBuild (docs/accounts.md), start Docker, or set image_uri to an existing image"


def check(region: str, prefix: str) -> SettingError | None:
    """Return the reason why CodeBuild can't be used, by a call that changes nothing.

    An account that may run no build can't be told in advance: Service Quotas shows a number above 0 for it.
    """
    try:
        client("codebuild", region).batch_get_projects(names=[f"{prefix}-image-project"])
    except (BotoCoreError, ClientError) as error:
        reason = error_reason(error)
        if any(each in reason.lower() for each in DENIED):
            problem = f"has to build the image, but AWS refuses ({ACTION}: {reason})"
            return SettingError("image_build", "codebuild", problem, HINT)
        warn(f"image_build: CodeBuild did not answer ({ACTION}: {reason}); continuing")
    return None
