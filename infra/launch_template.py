"""EC2 launch template of instances with their network interfaces, an encrypted disk and required metadata tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.definitions import efa
from infra.definitions.user_data import ROOT_DEVICE, encoded


def launch_template(
    name: str,
    profile: aws.iam.InstanceProfile,
    *,
    group_id: pulumi.Input[str],
    user_data: pulumi.Output[str],
    disk_gib: int,
    disk_throughput: int | None = None,
    kms_key_arn: pulumi.Input[str],
    is_public: bool = False,
    efa_cards: Collection[int] = (),
    efa_group_id: pulumi.Input[str] = "",
    **options: Any,
) -> aws.ec2.LaunchTemplate:
    """Create a launch template; `options` are others of aws.ec2.LaunchTemplate."""
    interfaces = efa.interfaces(efa_cards)
    groups = {"interface": [group_id], "efa": [group_id, efa_group_id], "efa-only": [efa_group_id]}
    return aws.ec2.LaunchTemplate(
        name,
        iam_instance_profile=aws.ec2.LaunchTemplateIamInstanceProfileArgs(arn=profile.arn),
        network_interfaces=[
            aws.ec2.LaunchTemplateNetworkInterfaceArgs(
                device_index=0,
                network_card_index=card or None,
                interface_type=None if kind == "interface" else kind,
                # Overrides the subnet's setting, which may assign public addresses. EC2 refuses it with several
                # interfaces. https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html
                associate_public_ip_address=str(is_public).lower() if len(interfaces) == 1 else None,
                security_groups=groups[kind],
                delete_on_termination="true",
            )
            for card, kind in interfaces.items()
        ],
        user_data=user_data.apply(encoded),
        metadata_options=aws.ec2.LaunchTemplateMetadataOptionsArgs(
            http_endpoint="enabled", http_tokens="required", http_put_response_hop_limit=1
        ),
        block_device_mappings=[
            aws.ec2.LaunchTemplateBlockDeviceMappingArgs(
                device_name=ROOT_DEVICE,
                ebs=aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
                    volume_size=disk_gib,
                    throughput=disk_throughput,
                    volume_type="gp3",
                    encrypted="true",
                    kms_key_id=kms_key_arn or None,
                    delete_on_termination="true",
                ),
            )
        ],
        **options,
    )
