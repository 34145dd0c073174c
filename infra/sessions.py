"""Session Manager documents for access to the head: a shell, training and port forwarding.

AWS's documents run any command as root on the instance and forward any port. A user whose IAM policy allows only these
documents has a shell in the head's container, training, and ports 8265 and 8888 of hosts that the head's instance
reaches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.definitions import commands


@dataclass(frozen=True, kw_only=True)
class SessionsArgs:
    """Inputs of Sessions; `gpus` is the number that training requests by default."""

    gpus: int


class Sessions(pulumi.ComponentResource):
    """Names of the three session documents."""

    shell: pulumi.Output[str]
    train: pulumi.Output[str]
    forward: pulumi.Output[str]

    def __init__(self, name: str, args: SessionsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Sessions", name, None, opts)
        self._name = name
        self.shell = self._document("shell", commands.interactive("Shell in the Ray head's container", commands.SHELL))
        self.train = self._document("train", commands.interactive("Training on the cluster", commands.train(args.gpus)))
        self.forward = self._document("forward", commands.forwarding())
        self.register_outputs({})

    def _document(self, kind: str, content: commands.Document) -> pulumi.Output[str]:
        document = aws.ssm.Document(
            f"{self._name}-{kind}",
            document_type="Session",
            document_format="JSON",
            content=json.dumps(content),
            opts=pulumi.ResourceOptions(parent=self),
        )
        return document.name
