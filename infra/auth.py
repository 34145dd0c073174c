"""Ray's token: who has it may run code on the cluster, so it never leaves AWS's parameter store in the clear."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_aws as aws
import pulumi_random as random

from infra.tags import tags


@dataclass(frozen=True, kw_only=True)
class AuthTokenArgs:
    """Inputs of AuthToken. Another word in `rotate` makes another token."""

    length: int = 64
    rotate: str = ""
    kms_key_arn: pulumi.Input[str] = ""


class AuthToken(pulumi.ComponentResource):
    """A random token in an encrypted SSM parameter, which ECS hands to the containers as a secret."""

    parameter_name: pulumi.Output[str]
    parameter_arn: pulumi.Output[str]

    def __init__(self, name: str, args: AuthTokenArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:AuthToken", name, None, opts)
        token = random.RandomPassword(
            f"{name}-token",
            length=args.length,
            # It travels in HTTP headers and shell variables.
            special=False,
            keepers={"rotate": args.rotate} if args.rotate else None,
            # Without a word the token stays: running nodes would keep it, and nothing would restart them.
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=None if args.rotate else ["keepers"]),
        )
        parameter = aws.ssm.Parameter(
            f"{name}-parameter",
            description="Token of the Ray cluster",
            type="SecureString",
            value=token.result,
            key_id=args.kms_key_arn or None,
            tags=tags(f"{name}-parameter"),
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.parameter_name = parameter.name
        self.parameter_arn = parameter.arn
        self.register_outputs({"parameter_name": self.parameter_name, "parameter_arn": self.parameter_arn})
