"""Ray authentication token in SSM Parameter Store. Its holder can run code on the cluster."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_aws as aws
import pulumi_random as random


@dataclass(frozen=True, kw_only=True)
class AuthTokenArgs:
    """Inputs of AuthToken; a new value of `rotate` replaces the token."""

    rotate: str = ""
    kms_key_arn: pulumi.Input[str] = ""


class AuthToken(pulumi.ComponentResource):
    """Random token in a SecureString parameter, which ECS injects into the containers as a secret."""

    parameter_name: pulumi.Output[str]
    parameter_arn: pulumi.Output[str]

    def __init__(self, name: str, args: AuthTokenArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:AuthToken", name, None, opts)
        token = random.RandomPassword(
            f"{name}-token",
            length=64,
            # The token is used in HTTP headers and shell variables.
            special=False,
            keepers={"rotate": args.rotate} if args.rotate else None,
            # Removing `rotate` must not replace the token: nothing would restart the nodes that hold it.
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=None if args.rotate else ["keepers"]),
        )
        parameter = aws.ssm.Parameter(
            f"{name}-parameter",
            description="Token of the Ray cluster",
            type="SecureString",
            value=token.result,
            key_id=args.kms_key_arn or None,
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.parameter_name = parameter.name
        self.parameter_arn = parameter.arn
        self.register_outputs({"parameter_name": self.parameter_name, "parameter_arn": self.parameter_arn})
