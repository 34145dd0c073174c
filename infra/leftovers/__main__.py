"""List what the account holds of a stack that its state does not know, with the commands that delete it.

    make leftovers | sh      deletes it, but for buckets

Exit status: 0, or 2 if what there is can't be told.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from infra.leftovers import account, state
from infra.tags import name_prefix

PROJECT_FILE = Path("Pulumi.yaml")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the commands and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        project = re.findall(r"^name:\s*(\S+)", PROJECT_FILE.read_text(), re.MULTILINE)[0]
        name = options.stack or state.pulumi("stack", "--show-name")
        region = options.region or _region(name)
        exported = (
            state.read(options.state) if options.state else json.loads(state.pulumi("stack", "export", "--stack", name))
        )
    except (OSError, state.StateError) as error:
        print(f"leftovers: {error}", file=sys.stderr)
        return 2
    stack = account.Stack(
        tags={"project": project, "stack": name},
        prefix=name_prefix(project, name),
        session=boto3.Session(region_name=region),
    )
    return report(stack, state.known_ids(exported), account.listings())


def report(stack: account.Stack, known: set[str], listings: Mapping[str, account.Listing]) -> int:
    """Print the commands that delete what is not known, kind by kind, and return the exit status."""
    found_any, unlisted = False, False
    for kinds, listing in listings.items():
        try:
            for found in listing(stack):
                if found.id in known:
                    continue
                found_any = True
                print(f"# {found.kind} {found.id}")
                for command in found.commands:
                    # Not by a pipe into a shell: what is in a bucket is somebody's work.
                    mark = "# " if found.keeps else ""
                    print(f"{mark}aws --region {stack.session.region_name} {command}")
        except (BotoCoreError, ClientError) as error:
            unlisted = True
            print(f"leftovers: {kinds} can't be listed: {error}", file=sys.stderr)
    if not found_any and not unlisted:
        print("nothing")
    return 2 if unlisted else 0


def _region(stack: str) -> str:
    """The region of the stack's configuration, or that of the environment, as Pulumi takes them."""
    try:
        return state.pulumi("config", "get", "aws:region", "--stack", stack)
    except state.StateError:
        if region := boto3.Session().region_name:
            return region
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra.leftovers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stack", help="the stack's name; by default the one that is selected")
    parser.add_argument("--region", help="the stack's region; by default that of its configuration")
    parser.add_argument("--state", help="a file with what `pulumi stack export` prints; by default Pulumi is asked")
    return parser


if __name__ == "__main__":
    sys.exit(main())
