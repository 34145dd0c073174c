"""Choice of EFA for a pool: on or off as its key says, or by its types and its number of workers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from infra.config.worker_pool import WorkerPoolArgs
from infra.definitions import efa
from infra.definitions.sizing import InstanceType
from infra.errors import SettingError, note, warn
from ray_on_ecs.contract import field_of


def cards(
    name: str, pool: WorkerPoolArgs, instances: Sequence[InstanceType], *, spread: bool, public: Collection[str]
) -> tuple[int, ...]:
    """Network cards of a pool's instances that get an EFA; `public` are its subnets that assign public addresses.

    With `true`, a SettingError says what EFA lacks. With `auto`, EFA is off then, with a warning if a type has it: the
    pool works without it, and a user who lists types for their capacity keeps them all. It is off by default, as it has
    not run on AWS, and the tasks of a pool that is up could not start on its instances.
    """
    field, is_alone = field_of(name, "efa"), pool.most < 2
    problem, hint = _lack(instances, spread=spread, public=public)
    if pool.efa == "false" and not (problem or is_alone):
        note(f"{field}: EFA, which {instances[0].name} has, is off; set it to auto to use it (docs/efa.md)")
    if pool.efa == "false" or (pool.efa == "auto" and is_alone):
        return ()
    if not problem:
        return instances[0].efa_cards
    hint = f"{hint}, or set it to false"
    if pool.efa == "true":
        raise SettingError(field, pool.efa, problem, hint)
    if any(instance.efa_cards for instance in instances):
        warn(f"{field}: EFA is off: {pool.efa!r} {problem}; {hint}")
    return ()


def _lack(instances: Sequence[InstanceType], *, spread: bool, public: Collection[str]) -> tuple[str, str]:
    """Reason why these instances can't use EFA, and the way out; empty if they can."""
    numbers = {instance.name: len(instance.efa_cards) for instance in instances}
    if not all(instance.gpus for instance in instances):
        return f"connects GPUs, and {instances[0].name} has none", "use a type with GPUs"
    if not any(numbers.values()):
        return f"needs a type with EFA, which {' and '.join(numbers)} can't have", "use a larger type of the family"
    if len({instance.efa_cards for instance in instances}) > 1:
        listed = ", ".join(f"{name} has {number}" for name, number in numbers.items())
        return f"needs types with the same EFA interfaces: {listed}", "use one of them, and a pool for each other"
    if spread:
        return "needs workers in one zone, and spread_zones lets a job span several", "set spread_zones to false"
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-instance-addressing.html
    if public and len(efa.interfaces(instances[0].efa_cards)) > 1:
        problem = (
            f"needs several network interfaces, and {' and '.join(public)} assigns a public address, for one alone"
        )
        command = "aws ec2 modify-subnet-attribute --no-map-public-ip-on-launch --subnet-id"
        return problem, f"turn that off ({command} {next(iter(public))})"
    return "", ""
