"""Ask the cluster of `RAY_ADDRESS` whether it accepts this process's token, before Ray joins it.

Ray itself would try for 20 seconds to join a cluster that refuses it, and print as many errors.
"""

import os
import time

from ray_on_ecs.errors import ResourceError, UsageError
from ray_on_ecs.node import api
from ray_on_ecs.run.queue import LOCAL
from ray_on_ecs.run.ray_private import AUTH_MODE_ENV_VAR, enable_token_authentication

ANSWER_SECONDS = 3.0
# A GCS is busy, for instance, just after its head has restarted.
BUSY_SECONDS = 30.0
RETRY_SECONDS = 1.0


def check(address: str) -> None:
    """Return if the Ray cluster at `host:port` accepts this process.

    If `RAY_AUTH_MODE` is unset and the cluster wants a token, this process sends the one that it has: in
    `RAY_AUTH_TOKEN`, or in the file `~/.ray/auth_token` that Ray makes.

    Raises:
        UsageError: The cluster wants another token, or any, or has none.
        ResourceError: The process that listens there is not a Ray cluster.
    """
    mode = os.environ.get(AUTH_MODE_ENV_VAR)
    if _accepts(address, ""):
        if mode == "token":  # its actors' calls to this process would be refused
            raise UsageError(f"RAY_AUTH_MODE: the Ray cluster at {address!r} has no token; unset RAY_AUTH_MODE")
        return
    token = api.own_token()
    if mode not in (None, "token") or not token:
        raise UsageError(
            f"RAY_AUTH_MODE: the Ray cluster at {address!r} wants a token; set RAY_AUTH_MODE=token, and its token in "
            "RAY_AUTH_TOKEN or ~/.ray/auth_token"
        )
    if not _accepts(address, token):
        where = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else "~/.ray/auth_token"
        raise UsageError(f"{where}: is not the token of the Ray cluster at {address!r}; set RAY_AUTH_TOKEN to it")
    if mode is None:
        enable_token_authentication()


def _accepts(address: str, token: str) -> bool:
    """Return whether the cluster accepts a token; empty for none.

    Raises:
        ResourceError: The process that listens there is not a Ray cluster.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            api.check_gcs(address, ANSWER_SECONDS, token)
            return True
        except api.TokenError:
            return False
        except api.AnswerError as cause:
            if not cause.is_passing or time.monotonic() >= deadline:
                raise ResourceError(
                    f"RAY_ADDRESS: what listens at {address!r} does not answer as a Ray cluster does ({cause.reason}); "
                    f"correct it, or train on this machine by {LOCAL}"
                ) from cause
        time.sleep(RETRY_SECONDS)
