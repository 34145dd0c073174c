"""List what the account holds of a stack that its state does not know, with the commands that delete it.

    make leftovers | sh      deletes it, but for what is printed as a comment

Exit status: 0, or 2 if what there is can't be told.
"""

from __future__ import annotations

import argparse
import os
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
        stack, known = _look_up(options)
        return report(stack, known, account.listings())
    except (OSError, ValueError, BotoCoreError, ClientError, state.StateError) as error:
        print(f"leftovers: {error}", file=sys.stderr)
        return 2


def _look_up(options: argparse.Namespace) -> tuple[account.Stack, set[str]]:
    """Return whose resources are looked for, and what its state knows."""
    project = re.findall(r"^name:\s*(\S+)", PROJECT_FILE.read_text(), re.MULTILINE)[0]
    chosen = ("--stack", options.stack) if options.stack else ()
    name = (options.stack or state.pulumi("stack", "--show-name")).rpartition("/")[2]
    region = options.region or state.setting("aws:region", *chosen) or os.environ.get("AWS_REGION")
    profile = None if options.state else state.setting("aws:profile", *chosen)
    session = boto3.Session(region_name=region, profile_name=profile)
    if not session.region_name:
        raise state.StateError("there is no region; give --region")
    session.client("sts").get_caller_identity()  # rather than a complaint for each kind
    known = state.known_ids(state.read(options.state) if options.state else state.exported(*chosen))
    return account.Stack(
        tags={"project": project, "stack": name}, prefix=name_prefix(f"{project}-{name}"), session=session
    ), known


def report(stack: account.Stack, known: set[str], listings: Mapping[str, account.Listing]) -> int:
    """Print the commands that delete what is not known, kind by kind, and return the exit status."""
    found_any, unlisted = False, False
    aws = f"aws --region {stack.session.region_name}"
    if stack.session.profile_name != "default":
        aws += f" --profile {stack.session.profile_name}"
    for kinds, listing in listings.items():
        try:
            for found in listing(stack):
                if found.id in known:
                    continue
                if not found_any:
                    print("export AWS_PAGER=")
                found_any = True
                print(f"# {found.kind} {found.id}" + (f": {found.doubt}" if found.doubt else ""))
                for command in found.commands:
                    # A pipe into a shell must not run what a person has to decide.
                    print(f"{'# ' if found.doubt else ''}{aws} {command}")
        except (BotoCoreError, ClientError) as error:
            unlisted = True
            print(f"leftovers: {kinds} can't be listed: {str(error).splitlines()[0]}", file=sys.stderr)
    if not found_any and not unlisted:
        print("# nothing")
    return 2 if unlisted else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra.leftovers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stack", help="the stack's name; by default the one that is selected")
    parser.add_argument("--region", help="the stack's region; by default that of its configuration")
    parser.add_argument("--state", help="a file with what `pulumi stack export` prints; by default Pulumi is asked")
    return parser


if __name__ == "__main__":
    sys.exit(main())
