"""The NAT instance's user data between real network namespaces: a private host, the VPC's router and the internet."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from infra.definitions.nat import PrivateInterface, user_data
from tests.waiting import until

HOST, NAT, INTERNET = "10.0.96.20", "10.0.255.245", "198.51.100.7"
PRIVATE = PrivateInterface(
    interface_id="eni-0a1b", mac="02:00:00:00:00:02", address="10.0.64.10", subnet="10.0.64.0/19", vpc="10.0.0.0/16"
)
# The router sends packets as route tables do: from private subnets to the VPC, else to the private interface. Towards
# the NAT instance's first interface it checks source and destination.
NETWORK = f"""
set -e
for name in host router nat internet unattached; do ip netns add $name; ip -n $name link set lo up; done
join() {{
  ip -n router link add $1 mtu 9001 type veth peer name $2 netns $4 $7 $8
  ip -n router address add $3 dev $1; ip -n router link set $1 up
  [ -z "$5" ] || {{ ip -n $4 link set $2 mtu 9001 up; ip -n $4 address add $5 dev $2; }}
  [ -z "$6" ] || ip -n $4 route add default via $6
}}
join to-host eth0 10.0.96.1/19 host {HOST}/19 10.0.96.1
join to-public ens5 10.0.255.241/28 nat {NAT}/28 10.0.255.241
join to-internet eth0 198.51.100.1/24 internet {INTERNET}/24 ''
ip -n internet route add {NAT} via 198.51.100.1
join to-private ens6 10.0.64.1/19 unattached '' '' address {PRIVATE.mac}
in_router() {{ ip netns exec router "$@"; }}
in_router sysctl -qw net.ipv4.ip_forward=1
for from in to-host to-private; do
  ip -n router rule add pref 10 iif $from to {PRIVATE.vpc} lookup main
  ip -n router rule add pref 11 iif $from lookup 100
done
ip -n router route add default via {PRIVATE.address} dev to-private table 100
in_router iptables -A FORWARD -i to-public ! -s {NAT} -j DROP
in_router iptables -A FORWARD -o to-public ! -d {NAT} -j DROP
for strict in all default; do ip netns exec nat sysctl -qw net.ipv4.conf.$strict.rp_filter=1; done
"""
# EC2 and the metadata service: the interface belongs to the previous instance once, then it is attached.
CURL = """#!/bin/bash
case "$*" in
  *api/token) echo a-token ;;
  *placement/region) echo us-west-2 ;;
  *security-credentials/) echo a-role ;;
  *security-credentials/a-role) printf '"%s" : "%s",\\n' AccessKeyId A SecretAccessKey b/+ Token c== ;;
  *services/domain) echo amazonaws.com ;;
  *instance-id) echo i-0abc ;;
  *AttachNetworkInterface*)
    printf '%s\\n' "$@" > CALLS.new
    if mv -n CALLS.new CALLS && [ ! -e CALLS.new ]; then echo InvalidParameterValue; exit; fi
    ip -n unattached link set ens6 netns nat ;;
esac
"""
# Runs the unit that is enabled last.
SYSTEMCTL = """#!/bin/bash
echo "$@" >> FOLDER/units
case "$*" in enable*) exec $(sed -n 's/^ExecStart=//p' FOLDER/etc/systemd/system/${@: -1}.service) ;; esac
"""
# Tells the address that it sees and its largest segment.
SERVER = """
import socket
listener = socket.create_server(("0.0.0.0", 80))
while True:
    connection, (address, _) = listener.accept()
    connection.sendall(f"{address} {connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)}".encode())
    connection.close()
"""
# Each of which ends all connections.
LOSSES = (
    "iptables -t nat -F",
    "iptables -P FORWARD DROP",
    f"ip route delete {PRIVATE.vpc}",
    "ip address flush dev ens6",
    "ip link set ens6 down",
    "sysctl -qw net.ipv4.ip_forward=0",
)
CLIENT = "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 1).recv(99).decode())"


@dataclass
class Namespaces:
    """Network namespaces below one of a user, whose root needs no rights of this machine."""

    holder: subprocess.Popen[str]
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def command(self, *command: str) -> list[str]:
        """A command inside."""
        enter = ["nsenter", f"--target={self.holder.pid}", "--user", "--net", "--mount", "--preserve-credentials"]
        return [*enter, *command]

    def run(self, namespace: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in one of them to its end."""
        inside = self.command("ip", "netns", "exec", namespace, *command)
        return subprocess.run(inside, capture_output=True, text=True, timeout=60, check=False)

    def start(self, namespace: str, *command: str, log: Path | None = None) -> None:
        """Start a process in one of them, until the end of the test."""
        inside = self.command("ip", "netns", "exec", namespace, *command)
        with open(log or os.devnull, "w") as output:
            self.running.append(
                subprocess.Popen(inside, text=True, stdout=output, stderr=output, start_new_session=True)
            )

    def connect(self, to: str = INTERNET, port: int = 80) -> str:
        """The answer to a connection from the private host, or the error's last line."""
        client = self.run("host", sys.executable, "-c", CLIENT, to, str(port))
        return (client.stdout or client.stderr).strip().splitlines()[-1]


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    """The network without the private interface attached, and a server in the internet."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "iptables", "sysctl") if not shutil.which(tool)]
    if missing:
        pytest.skip(f"network namespaces need {' and '.join(missing)}")
    ready = "mount -t tmpfs none /run && mkdir /run/netns && echo ready && exec sleep infinity"
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", ready]
    holder = subprocess.Popen(unshare, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    made = Namespaces(holder)
    try:
        output = holder.stdout.readline() if holder.stdout else ""
        network = subprocess.run(made.command("bash", "-c", NETWORK), capture_output=True, text=True, check=False)
        if network.returncode:
            pytest.skip(f"this machine allows no network namespaces: {output.strip()} {network.stderr.strip()}")
        made.start("internet", sys.executable, "-c", SERVER)
        yield made
    finally:
        for process in made.running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        holder.kill()
        holder.communicate()


def boot(namespaces: Namespaces, folder: Path) -> None:
    """Run the user data with a short `sleep` and below a folder, which then has the calls of EC2 and of systemd."""
    for place in ("etc/systemd/network", "etc/systemd/system", "etc/udev/rules.d", "bin"):
        (folder / place).mkdir(parents=True)
    programs = {
        "curl": CURL.replace("CALLS", str(folder / "calls")),
        "systemctl": SYSTEMCTL.replace("FOLDER", str(folder)),
        "networkctl": "#!/bin/sh\n",
        "sleep": "#!/bin/sh\nexec /bin/sleep 0.1\n",
        "user-data": user_data(PRIVATE).replace("/etc/", f"{folder}/etc/").replace("/usr/local/bin/", f"{folder}/bin/"),
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = f"PATH={folder}:/usr/sbin:/usr/bin:/sbin:/bin"
    namespaces.start("nat", "env", path, str(folder / "user-data"), log=folder / "log")


def test_private_hosts_reach_the_internet_as_nat(namespaces: Namespaces, tmp_path: Path) -> None:
    boot(namespaces, tmp_path)
    until(lambda: (answer := namespaces.connect()).startswith(NAT) and int(answer.split()[1]) <= 1460)
    asked = (tmp_path / "calls").read_text().splitlines()
    assert "NetworkInterfaceId=eni-0a1b&InstanceId=i-0abc" in asked
    assert {"aws:amz:us-west-2:ec2", "A:b/+", "x-amz-security-token: c==", "https://ec2.us-west-2.amazonaws.com/"} <= {
        *asked
    }
    # Neither Docker nor the system's configuration of interfaces comes in between.
    masked, _ = (tmp_path / "units").read_text().splitlines()
    assert {"mask", "ecs", "docker"} <= {*masked.split()}
    network = (tmp_path / "etc/systemd/network/10-nat.network").read_text()
    assert network == f"[Match]\nMACAddress={PRIVATE.mac}\n[Link]\nUnmanaged=yes\n"
    # A host that is refused has reached the instance.
    until(lambda: "timed out" in namespaces.connect(PRIVATE.address, 22))


@pytest.mark.ray  # with the tests that take long
def test_what_is_lost_is_set_again(namespaces: Namespaces, tmp_path: Path) -> None:
    boot(namespaces, tmp_path)
    until(lambda: namespaces.connect().startswith(NAT))
    for loss in LOSSES:
        assert namespaces.run("nat", *loss.split()).returncode == 0, loss
    until(lambda: namespaces.connect().startswith(NAT))
    assert namespaces.run("nat", "ip", "link", "set", "ens6", "netns", "unattached").returncode == 0
    until(lambda: namespaces.connect().startswith(NAT))
