"""Addresses of buckets and folders without a key in them: errors, documents and lists of processes show addresses."""

import re

from ray_on_ecs.errors import UsageError

# After ://, a bucket with a sign that names do not have, an '@' after what is not a bucket, or options of pyarrow.
KEY_IN_ADDRESS = re.compile(r"/*[^/]*(?:[@%\\]|:(?!\d+(?:/|$)))|(?!/*[a-z0-9._-]+/).*(?:@|%40)|.*\?", re.DOTALL)
# Without ://, an address that is not complete; NAME= is that of --input.
KEY_IN_PATH = re.compile(
    r"(?:(?![/.~])[^=:]*=)?+(?:stream:)?+(?:s3a?:|(?![/.~]).*:.*(?:@|%40))", re.DOTALL | re.IGNORECASE
)


def check_address(what: str, address: str) -> None:
    """Raise UsageError for an address, of an input after `NAME=`, that may hold a key; `what` names it in the error."""
    before, scheme, rest = address.partition("://")
    if KEY_IN_ADDRESS.match(rest) if scheme else KEY_IN_PATH.match(address):
        shown = f"{before}://…" if re.fullmatch(r"(?:\w+=)?(?:stream:)?s3", before) and scheme else "the value"
        raise UsageError(
            f"{what}: {shown} may have a key in its address; give s3://bucket/prefix without '@' or ':' in the bucket "
            "and without '?', or a folder's path that begins with '/' or './': the role of the cluster, or the "
            "credentials of this machine, open the bucket"
        )
