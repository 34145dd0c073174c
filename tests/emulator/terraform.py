"""Terraform in a folder with one configuration and one state, on the AWS that the environment leads to."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Majors in which the resources of pulumi-aws 7 have the same names.
PROVIDER = {"source": "hashicorp/aws", "version": ">= 5.100, < 7"}
# Of the text in a configuration: a template that is not a reference made by `reference`.
TEMPLATE = re.compile(r"([$%])\{(?!(?:data\.)?aws_[\w.\[\]-]+\})")
HARMLESS = ("Incomplete lock file", "Unable to open CLI configuration", "Deprecated", "Argument is deprecated")


class Refused(Exception):
    """A refusal of the program, the provider or AWS, with its text."""


def reference(address: str, attribute: str) -> str:
    """Terraform's template for an attribute that is known after the resource is created."""
    return f"${{{address}.{attribute}}}"


def is_reference(value: Any) -> bool:
    """True if a value, or a part of it, is known only after a resource is created."""
    return "${aws_" in json.dumps(value) or "${data.aws_" in json.dumps(value)


@dataclass(frozen=True)
class Terraform:
    """The commands in a folder, which is created; their output is appended to `terraform.log` in it."""

    folder: Path
    region: str

    def write(self, configuration: dict[str, Any]) -> None:
        """Replace the configuration; the first time, install the provider."""
        aws = {
            "region": self.region,
            "s3_use_path_style": True,
            "skip_credentials_validation": True,
            "skip_metadata_api_check": True,
            "max_retries": 2,
        }
        body = {"terraform": {"required_providers": {"aws": PROVIDER}}, "provider": {"aws": aws}, **configuration}
        text = TEMPLATE.sub(r"\1\1{", json.dumps(body, indent=1))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "main.tf.json").write_text(text)
        if not (self.folder / ".terraform").exists():
            self.run("init", "-input=false")

    def run(self, command: str, *options: str, passing: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        """Run a command; what it or AWS refuses is raised."""
        line = ["terraform", *command.split(), *options, "-no-color"]
        done = subprocess.run(line, cwd=self.folder, capture_output=True, text=True)
        with (self.folder / "terraform.log").open("a") as log:
            log.write(f"\n$ {' '.join(line)}\n{done.stdout if '-json' not in line else ''}{done.stderr}")
        if done.returncode not in passing:
            raise Refused(_plain(done.stderr) or f"terraform {command} ended with {done.returncode}")
        return done

    def json(self, command: str, *options: str) -> Any:
        """Return the output of a command as a document."""
        return json.loads(self.run(command, "-json", *options).stdout)

    def schema(self) -> dict[str, Any]:
        """Return the provider's schema: its resources and data sources."""
        [provider] = self.json("providers schema")["provider_schemas"].values()
        return provider

    def plan(self) -> dict[str, Any]:
        """Return the plan, and write it to `plan.json`."""
        self.run("plan", "-input=false", "-out=plan.bin")
        plan = self.json("show", "plan.bin")
        (self.folder / "plan.json").write_text(json.dumps(plan))
        return plan

    def apply(self, *options: str) -> list[str]:
        """Make AWS like the configuration, and return the warnings."""
        return warnings(self.run("apply", "-input=false", "-auto-approve", *options).stdout)

    def is_settled(self) -> bool:
        """True if another plan changes nothing."""
        return self.run("plan", "-input=false", "-detailed-exitcode", passing=(0, 2)).returncode == 0

    def read(self, source: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return a data source's answer."""
        output = {"answer": {"value": f"${{data.{source}.answer}}", "sensitive": True}}
        self.write({"data": {source: {"answer": arguments}}, "output": output})
        self.apply()
        return self.outputs()["answer"]

    def outputs(self) -> dict[str, Any]:
        """Return the outputs, from the state."""
        state = json.loads((self.folder / "terraform.tfstate").read_text())
        return {name: output["value"] for name, output in state["outputs"].items()}


@contextmanager
def provider_running(terraform: Terraform) -> Generator[None]:
    """Install the provider and keep it running: started by each command it takes most of the time."""
    terraform.write({})
    [binary] = terraform.folder.glob(".terraform/providers/*/hashicorp/aws/*/*/terraform-provider-aws*")
    os.environ.pop("AWS_CA_BUNDLE", None)  # which a provider that is kept running can't read
    with (
        (terraform.folder / "provider.log").open("w") as log,
        subprocess.Popen([binary, "-debug"], stdout=subprocess.PIPE, stderr=log, text=True) as provider,
    ):
        for line in provider.stdout or ():
            if found := re.search("TF_REATTACH_PROVIDERS='(.+)'", line):
                os.environ["TF_REATTACH_PROVIDERS"] = found[1]
                break
        try:
            yield
        finally:
            del os.environ["TF_REATTACH_PROVIDERS"]
            provider.terminate()


def warnings(text: str) -> list[str]:
    """The provider's warnings in the output of a command, each once, without the many of deprecated arguments."""
    found = re.findall(r"Warning: (.+?)(?:\n *╵|\Z)", text, re.DOTALL)
    return sorted({_plain(each)[:400] for each in found if not each.startswith(HARMLESS)})


def _plain(text: str) -> str:
    """Text from the first error on, without Terraform's frame and the place of a data source, as Pulumi shows it."""
    line = " ".join(re.sub(r"[│╷╵]", " ", text[max(text.find("Error: "), 0) :]).split())
    return re.sub(r"^Error: (.*?),? with data\..*", r"\1", line)
