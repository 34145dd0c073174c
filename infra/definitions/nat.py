"""NAT instance: its type, machine image and user data, and the metrics by which it stops and starts with the head."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from infra.definitions import sleep
from infra.definitions.metrics import Metric, Name, of_group
from infra.definitions.user_data import AMI_PARAMETER, RESOLVE, run_unit

# Two network interfaces, 5 Gbit/s for minutes and 32 Mbit/s for ever.
# https://docs.aws.amazon.com/ec2/latest/instancetypes/gp.html
INSTANCE_TYPE = "t4g.nano"
# The ECS-optimized image, for the iptables that comes with its Docker: Amazon Linux 2023 has neither iptables nor nft,
# and dnf, which would need a mirror, runs out of the memory of such an instance. It has curl, and no AWS CLI.
# https://github.com/aws/amazon-ecs-ami and https://github.com/jamesmoriarty/cfn-cheapest-nat/pull/16
MACHINE_IMAGE = RESOLVE + AMI_PARAMETER.format(variant="arm64/")
# The image's size, which a disk must have. https://github.com/aws/amazon-ecs-ami/blob/main/variables.pkr.hcl
DISK_GIB = 30
UNIT = "ray-on-ecs-nat"
SCRIPT = f"/usr/local/bin/{UNIT}"
# Bytes of the largest packet in the VPC, and of a TCP segment on the way to the internet, whose packets have 1,500.
# https://docs.aws.amazon.com/vpc/latest/userguide/nat-gateway-basics.html
MTU, MSS = 9001, 1460
# By the kernel's default, an instance with so little memory tracks some 4,000 connections, and drops others.
CONNECTIONS = 65536
# Attaches the private interface and forwards what arrives there. All of it is repeated, so that nothing that is lost
# stays lost. EC2 refuses the interface until the previous instance has ended, and it is asked again.
# Only packets of the VPC are translated. Replies return by the private interface, whose source/destination check is
# off. The instance itself accepts no connection.
FORWARD = f"""
metadata=http://169.254.169.254/latest
ask() {{ curl -sf -m 5 -H "X-aws-ec2-metadata-token: $token" "$metadata/meta-data/$1"; }}
attach() {{
  local token region credentials
  token=$(curl -sf -m 5 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' $metadata/api/token)
  region=$(ask placement/region)
  credentials=$(ask "iam/security-credentials/$(ask iam/security-credentials/)")
  of() {{ sed -nE "s/.*\\"$1\\" *: *\\"([^\\"]+)\\".*/\\1/p" <<< "$credentials"; }}
  curl -sS -m 20 --aws-sigv4 "aws:amz:$region:ec2" --user "$(of AccessKeyId):$(of SecretAccessKey)" \\
    -H "x-amz-security-token: $(of Token)" "https://ec2.$region.$(ask services/domain)/" \\
    -d 'Action=AttachNetworkInterface&Version=2016-11-15&DeviceIndex=1' \\
    -d "NetworkInterfaceId=$interface_id&InstanceId=$(ask instance-id)"
}}
keep() {{ iptables -w -t "$1" -C "${{@:2}}" 2> /dev/null || iptables -w -t "$1" -A "${{@:2}}"; }}
forward() {{
  ip link set dev "$1" mtu {MTU} up
  ip address replace "$address" dev "$1"
  ip route replace "$vpc" via "$router" dev "$1"
  sysctl -qw net.ipv4.ip_forward=1
  iptables -w -P FORWARD ACCEPT
  keep nat POSTROUTING -s "$vpc" ! -o "$1" -j MASQUERADE
  keep mangle FORWARD -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --set-mss {MSS}
  keep filter INPUT -i "$1" -m conntrack --ctstate NEW -j DROP
  sysctl -qw net.netfilter.nf_conntrack_max={CONNECTIONS}
}}
while true; do
  interface=$(grep -lsx "$mac" /sys/class/net/*/address | cut -d/ -f5)
  if [[ $interface ]]; then forward "$interface"; sleep 10; else attach; sleep 3; fi
done
"""
# No container runs here, and Docker would drop forwarded packets. The private interface is this unit's alone: Amazon
# Linux would otherwise give it a default route and a routing policy.
# https://github.com/amazonlinux/amazon-ec2-net-utils
RUN_UNIT = """
systemctl mask --now --no-block ecs amazon-ecs-volume-plugin docker docker.socket containerd
ln -sf /dev/null /etc/udev/rules.d/99-vpc-policy-routes.rules
networkctl reload
""" + run_unit(UNIT, "NAT for the private subnets", "StandardOutput=journal+console")
# 1 while a request or the head needs the internet. MAX skips missing values.
NEEDED = "MAX([requested, instances, wanted])"
# Workers end before the head does. One that has not would stay registered with ECS: it is deregistered only while its
# agent is connected. So the NAT instance outlives the head's instance by more than ECS's managed scaling takes.
# https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_DeregisterContainerInstance.html
UNNEEDED_MINUTES = 30


@dataclass(frozen=True, kw_only=True)
class PrivateInterface:
    """Network interface to which the private subnets' default route leads, and the blocks of its subnet and VPC."""

    interface_id: str
    mac: str
    address: str
    subnet: str
    vpc: str


def script(private: PrivateInterface) -> str:
    """Script that attaches the interface to its instance, and forwards."""
    subnet = ipaddress.IPv4Network(private.subnet)
    values = {
        "interface_id": private.interface_id,
        "mac": private.mac,
        "address": f"{private.address}/{subnet.prefixlen}",
        # https://docs.aws.amazon.com/vpc/latest/userguide/subnet-sizing.html
        "router": subnet[1],
        "vpc": private.vpc,
    }
    return "\n".join(["#!/bin/bash", *(f"{name}={value}" for name, value in values.items())]) + FORWARD


def user_data(private: PrivateInterface) -> str:
    """User data script, which runs at the first boot; the unit that it makes runs at each."""
    unmanaged = ["[Match]", f"MACAddress={private.mac}", "[Link]", "Unmanaged=yes"]
    files = {"/etc/systemd/network/10-nat.network": "\n".join(unmanaged) + "\n", SCRIPT: script(private)}
    written = [f"cat > {path} <<'EOF'\n{text}EOF" for path, text in files.items()]
    return "\n".join(["#!/bin/bash", *written]) + RUN_UNIT


def metrics(namespace: Name, head_group: Name) -> dict[str, Metric]:
    """CloudWatch metrics by their name in the expression; the head's group publishes the number of its instances."""
    return {"requested": sleep.metrics(namespace)["requested"], **of_group(head_group)}
