"""States and errors of EC2 Auto Scaling and ECS, and the meaning of each for a node that has not started.

Every value that AWS documents is here. A value that is not is shown as AWS wrote it.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from ray_on_ecs.errors import GpuError, HeadError, NodeError, StartError


class Phase(Enum):
    """Part of the life of an instance, or of the activity that starts it."""

    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    GONE = "gone"
    PARKED = "parked"  # by a person, until a person continues it
    FAILED = "failed"
    WITHDRAWN = "withdrawn"  # failed if its message has a reason (launches.py)


class State(NamedTuple):
    """Phase of a state, and its meaning."""

    phase: Phase
    means: str = ""


class Meaning(NamedTuple):
    """Meaning of an error, and the way out; empty where AWS's own words say it."""

    means: str
    way_out: str = ""


class LaunchError(NamedTuple):
    """Errors of EC2 by their codes and sentences: a group of one instance type gives only EC2's sentence.

    `{zones}` and `{spot}` in the way out stand for the keys of the pool.
    """

    pattern: re.Pattern[str]
    means: str
    way_out: str


# https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_Activity.html
ACTIVITIES = {
    "PendingSpotBidPlacement": State(Phase.STARTING, "the Spot request is not placed yet"),
    "WaitingForSpotInstanceRequestId": State(Phase.STARTING, "EC2 has not accepted the Spot request yet"),
    "WaitingForSpotInstanceId": State(Phase.STARTING, "EC2 has not given a Spot Instance yet"),
    "WaitingForInstanceId": State(Phase.STARTING, "EC2 has not given an instance yet"),
    "PreInService": State(Phase.STARTING, "the instance is not in service yet"),
    "InProgress": State(Phase.STARTING, "EC2 starts the instance"),
    "MidLifecycleAction": State(Phase.STARTING, "a lifecycle hook of the group has not ended"),
    "WaitingForInstanceWarmup": State(Phase.STARTING, "the instance warms up"),
    "WaitingForInPlaceUpdateToStart": State(Phase.STARTING, "an update of the instance has not begun"),
    "WaitingForInPlaceUpdateToFinalize": State(Phase.STARTING, "an update of the instance has not ended"),
    "InPlaceUpdateInProgress": State(Phase.STARTING, "the instance is being updated"),
    "WaitingForELBConnectionDraining": State(Phase.ENDING),
    "WaitingForConnectionDraining": State(Phase.ENDING),
    "Successful": State(Phase.RUNNING),
    "Failed": State(Phase.FAILED),
    "Cancelled": State(Phase.WITHDRAWN),
}

# https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_Instance.html
LIFECYCLE = {
    "Pending": Phase.STARTING,
    "Pending:Wait": Phase.STARTING,
    "Pending:Proceed": Phase.STARTING,
    "InService": Phase.RUNNING,
    "Terminating": Phase.ENDING,
    "Terminating:Wait": Phase.ENDING,
    "Terminating:Proceed": Phase.ENDING,
    "Terminating:Retained": Phase.ENDING,
    "Terminated": Phase.GONE,
    "Detaching": Phase.ENDING,
    "Detached": Phase.GONE,
    "EnteringStandby": Phase.PARKED,
    "Standby": Phase.PARKED,
    "Quarantined": Phase.PARKED,
    "ReplacingRootVolume": Phase.STARTING,
    "ReplacingRootVolume:Wait": Phase.STARTING,
    "ReplacingRootVolume:Proceed": Phase.STARTING,
    "RootVolumeReplaced": Phase.STARTING,
    "Warmed:Pending": Phase.STARTING,
    "Warmed:Pending:Wait": Phase.STARTING,
    "Warmed:Pending:Proceed": Phase.STARTING,
    "Warmed:Pending:Retained": Phase.STARTING,
    "Warmed:Terminating": Phase.ENDING,
    "Warmed:Terminating:Wait": Phase.ENDING,
    "Warmed:Terminating:Proceed": Phase.ENDING,
    "Warmed:Terminating:Retained": Phase.ENDING,
    "Warmed:Terminated": Phase.GONE,
    "Warmed:Stopped": Phase.PARKED,
    "Warmed:Running": Phase.PARKED,
    "Warmed:Hibernated": Phase.PARKED,
}

# https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_ContainerInstance.html
CONTAINER_INSTANCES = {
    "ACTIVE": State(Phase.RUNNING),
    "REGISTERING": State(Phase.STARTING, "is still registering with ECS"),
    "REGISTRATION_FAILED": State(Phase.FAILED, "could not register with ECS"),
    "DRAINING": State(Phase.ENDING, "is being drained by ECS, and gets no task"),
    "DEREGISTERING": State(Phase.ENDING, "is leaving ECS"),
    "INACTIVE": State(Phase.GONE, "has left ECS"),
}

# https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_Task.html
# Meaning of a task's stop code; None if the stop was wanted.
STOP_CODES = {
    "TaskFailedToStart": "the task could not be started",
    "EssentialContainerExited": "",  # the exit code has the meaning
    "UserInitiated": None,
    "ServiceSchedulerInitiated": None,  # a scale-in or a deployment
    "SpotInterruption": "EC2 has reclaimed its Spot Instance",
    "TerminationNotice": "its instance was ended",
    "InfrastructureHealth": "ECS found its instance unhealthy",
}
# Reasons of stops by ECS's scheduler that are faults, nevertheless.
HEALTH = re.compile("health check|unhealthy", re.I)

# https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_Deployment.html
ROLLOUTS = {"COMPLETED": Phase.RUNNING, "IN_PROGRESS": Phase.STARTING, "FAILED": Phase.FAILED}

LOG = "the stack's log group has its last lines"
TOKEN = "pulumi up restores the execution role; check its permissions boundary, SCPs and the policy of kmsKeyArn"
NETWORK = "check the NAT gateway or the endpoints, network ACLs and DNS"
REGISTRY = "push the image again, or set imageUri, and pulumi up"
AMI = "remove workerAmiId, or set an ECS-optimized AMI with NVIDIA's driver"

REFUSED = Meaning("the registry refuses the execution role", "check registrySecretArn, or the ECR repository's policy")

# Details of a container's or a task's reason; the first match wins.
REASONS: dict[str, Meaning] = {
    r"select device driver|nvidia-container|libnvidia|nvml error|driver/library": Meaning(
        "the instance has no working NVIDIA driver for containers", AMI
    ),
    r"/dev/infiniband": Meaning(
        "the instance lacks an EFA device of its pool: it is older than the pool's EFA, or has no driver",
        "terminate the instance, and its group starts another (if no task starts then, set redeployWorkers to a new "
        "word, and pulumi up), or set the pool's efa to false (docs/efa.md)",
    ),
    r"no space left on device": Meaning("the instance's disk is full", "raise rootVolumeGib, and pulumi up"),
    r"exec format error": Meaning("the image is for another CPU architecture than the instance", REGISTRY),
    r"(ssm|secrets? ?manager|parameter|secret|kms).*(AccessDenied|not authorized|forbidden)"
    r"|(AccessDenied|not authorized).*(ssm:|secretsmanager:|kms:|parameter|secret)": Meaning(
        "the execution role may not read Ray's token or the registry's password", TOKEN
    ),
    r"unable to pull secrets|fetching secret|invalid ssm param|ParameterNotFound|ResourceNotFoundException.*secret": (
        Meaning("ECS can't read Ray's token or the registry's password", TOKEN)
    ),
    r"toomanyrequests|rate limit|too many requests": Meaning(
        "the registry limits the number of pulls", "set registrySecretArn, or push the image to ECR as imageUri"
    ),
    r"(CannotPull|pull).*(timeout|timed out|deadline|no such host|dial tcp|connection re|send request failed)": Meaning(
        "the instance does not reach the image's registry", NETWORK
    ),
    r"CannotPull.*(not found|manifest unknown|does not exist|no matching manifest|name unknown)": Meaning(
        "the registry does not have the image", REGISTRY
    ),
    r"CannotPull.*(denied|no basic auth|unauthorized|forbidden|403|not authorized)": REFUSED,
    r"executable file not found|no such file or directory.*exec|exec.*no such file": Meaning(
        "the image lacks a command of the cluster", "build imageUri from the project's image (docs/image.md)"
    ),
    r"RESOURCE:\w+|insufficient (cpu|memory|gpu)": Meaning(
        "the instance has too little room for the task", "use the same size for all workerInstanceTypes"
    ),
    r"network interface|ENI\b": Meaning("the task got no network interface", "check the subnet's free addresses"),
    r"assume (the )?role|is unable to assume": Meaning(
        "ECS may not assume the task's roles", "pulumi up restores them"
    ),
    r"Host EC2.*(terminat|stopp)|instance.*terminated": Meaning("its instance was ended"),
}

# Names that ECS's agent puts in front of a reason.
# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/stopped-task-error-codes.html
# https://github.com/aws/amazon-ecs-agent/blob/master/agent/dockerclient/dockerapi/errors.go
_NEW_INSTANCE = "terminate the instance, and its group starts another"
_PULL = Meaning("the image can't be pulled", REGISTRY)
_TIMEOUT = Meaning("Docker took too long, as a slow disk may make it", _NEW_INSTANCE)
_VOLUME = Meaning("Docker can't use a volume of the task", _NEW_INSTANCE)
ERRORS = {
    **dict.fromkeys(("CannotPullContainerError", "CannotPullECRContainerError"), _PULL),
    "CannotPullContainerAuthError": REFUSED,
    "CannotCreateContainerError": Meaning("Docker can't create the container", _NEW_INSTANCE),
    "CannotStartContainerError": Meaning("Docker can't start the container", _NEW_INSTANCE),
    "CannotStopContainerError": Meaning("Docker can't stop the container", _NEW_INSTANCE),
    "CannotRemoveContainerError": Meaning("Docker can't remove the container", _NEW_INSTANCE),
    **dict.fromkeys(
        (
            *("CannotInspectContainerError", "CannotDescribeContainerError", "CannotListContainersError"),
            *("CannotListImagesError", "CannotListPluginsError", "CannotGetDockerclientError"),
            *("CannotGetDockerClientVersionError", "ContainerRuntimeError", "DockerStateError"),
        ),
        Meaning("Docker on the instance failed", _NEW_INSTANCE),
    ),
    **dict.fromkeys(("CannotCreateVolumeError", "CannotInspectVolumeError", "CannotRemoveVolumeError"), _VOLUME),
    "ContainerNetworkingError": Meaning("the task got no network", "check the subnet's free addresses"),
    "ContainerRuntimeTimeoutError": _TIMEOUT,
    "ContainerVanishedError": Meaning("the container has vanished from its instance", _NEW_INSTANCE),
    "DockerTimeoutError": _TIMEOUT,
    "InternalError": Meaning("ECS's agent failed", _NEW_INSTANCE),
    "NoSuchContainerError": Meaning("the container has vanished from its instance", _NEW_INSTANCE),
    "OutOfMemoryError": Meaning(
        "the task had no memory left", "use an instance type with more memory, or less memory in the script"
    ),
    "ResourceInitializationError": Meaning("ECS can't prepare the task", LOG),
    "SpotInterruptionError": Meaning("EC2 has reclaimed its Spot Instance"),
    "TaskDependencyError": Meaning("ECS's agent failed", _NEW_INSTANCE),
    "TaskStoppedBeforePullBeginError": Meaning("the task was stopped before its image was pulled"),
}

# The image's own ones (docs/design/nodes.md), then those of Docker, the shell and signals.
EXIT_CODES = {
    NodeError.exit_status: Meaning("Ray ended", LOG),
    StartError.exit_status: Meaning(
        "Ray's token, the head's version of Ray or the image's PyTorch does not fit", f"pulumi up; {LOG}"
    ),
    HeadError.exit_status: Meaning("the node found no head", "ray-on-ecs status shows the head"),
    GpuError.exit_status: Meaning(
        "a GPU is missing or does not compute (its log says which)", "its instance is being replaced"
    ),
    125: Meaning("Docker can't run the container", _NEW_INSTANCE),
    126: Meaning("the image's command can't be executed", REGISTRY),
    127: Meaning("the image lacks its command", REGISTRY),
    132: Meaning("the CPU does not know an instruction of the program (SIGILL)", LOG),
    134: Meaning("the program aborted (SIGABRT)", LOG),
    137: Meaning(
        "killed (SIGKILL), for lack of memory or because it did not stop in time",
        "use an instance type with more memory, or less memory in the script",
    ),
    139: Meaning("the program crashed (SIGSEGV)", LOG),
    143: Meaning("ended by SIGTERM", LOG),
    255: Meaning("the program ended with an error, or Docker was restarted", LOG),
}

# Events of a service that tell nothing of a fault; other events are shown as ECS wrote them.
# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/service-event-messages-list.html
STEADY = re.compile("has reached a steady state")
HARMLESS = re.compile(
    r"has (started|stopped|begun draining)|\b(de)?registered \d|deployment (\S+ )?completed|set the desired|"
    r"computedDesiredCount|is in progress"
)


def _error(codes: str, means: str, way_out: str) -> LaunchError:
    return LaunchError(re.compile(codes, re.I), means, way_out)


UPDATE = "pulumi up --refresh --run-program repairs it"
# Errors of launches, and of instances that EC2 ends at once; the first match wins.
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/ts-as-instancelaunchfailure.html
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_StateReason.html
CAPACITY = _error(
    r"Insufficient\w*Capacity|UnfulfillableCapacity|not have sufficient (?!permission)|no Spot capacity|"
    r"Server\.SpotInstance(Termination|Shutdown)",
    "EC2 has no capacity",
    "add zones ({zones} or subnetIds), or types",
)
QUOTA = _error(
    r"VcpuLimitExceeded|vCPU limit|Max\s?Spot\s?Instance\s?Count|InstanceLimitExceeded",
    "the account's quota has no room",
    "ask for more under Service Quotas, or for fewer workers",
)
KEY = _error(
    r"InvalidKMSKey|KMS key|KMSKey|Client\.InternalError",
    "Auto Scaling may not use the KMS key of the disk",
    "set it as kmsKeyArn, or grant it to AWSServiceRoleForAutoScaling (docs/troubleshooting.md)",
)
RESERVATION = _error(
    r"Reservation\s?Capacity\s?Exceeded|capacity reservation|CapacityReservation|capacity block",
    "the capacity reservation has no free instance",
    "ray-on-ecs status shows its start, end and use",
)
LAUNCH_ERRORS = {
    "reservation": RESERVATION,
    "capacity": CAPACITY,
    "quota": QUOTA,
    "price": _error(
        r"SpotMaxPriceTooLow|Spot (request )?price|price-too-low",
        "the Spot price is above the maximum",
        "take them on demand: pulumi config set {spot} false",
    ),
    "storage quota": _error(
        r"VolumeLimitExceeded|MaxIOPSLimitExceeded|(gp|io|st|sc)\d storage|volume storage",
        "the account's quota of EBS storage has no room",
        "ask for more under Service Quotas (Amazon EBS)",
    ),
    "verification": _error(
        r"PendingVerification|is being validated|pending verification",
        "AWS still verifies the account, which takes minutes to hours",
        "wait for AWS's mail, or ask AWS Support after four hours",
    ),
    "blocked": _error(
        r"OptInRequired|not subscribed|\bBlocked\b|currently blocked",
        "AWS does not let this account use EC2 here",
        "ask AWS Support, or the account's owner",
    ),
    "key": KEY,
    "service-linked role": _error(
        r"ServiceLinkedRole",
        "the account lacks the service-linked role of EC2 Spot",
        "aws iam create-service-linked-role --aws-service-name spot.amazonaws.com",
    ),
    "policy": _error(
        r"UnauthorizedOperation|not authorized to perform|explicit deny|AccessDenied|AuthFailure",
        "an IAM policy or a service control policy forbids the launch",
        "ask the account's owner to allow it",
    ),
    "addresses": _error(
        r"InsufficientFreeAddressesInSubnet|not enough free addresses|PrivateIpAddressLimitExceeded",
        "the subnet has no free address",
        "add zones ({zones} or subnetIds), or free addresses",
    ),
    "network interfaces": _error(
        r"NetworkInterfaceLimitExceeded|network interface limit",
        "the account's quota of network interfaces has no room",
        "ask for more under Service Quotas (Amazon VPC)",
    ),
    "subnet": _error(r"InvalidSubnet|subnet ID\b.*does not exist", "the subnet does not exist", UPDATE),
    "image": _error(
        r"InvalidAMIID|\bAMI\b.*(not exist|invalid|unavailable|pending)|InvalidSnapshot",
        "the AMI can't be used",
        "pulumi up takes the newest one; correct workerAmiId if you set it",
    ),
    "type": _error(
        r"InvalidFleetConfiguration|\bUnsupported|not supported in your requested Availability Zone|"
        r"InvalidInstanceType",
        "the zone does not offer the type",
        "add zones ({zones} or subnetIds), or types",
    ),
    "placement group": _error(
        r"InvalidPlacementGroup|placement group\b.*(not exist|unknown|deleted)",
        "the placement group does not exist",
        UPDATE,
    ),
    "template": _error(
        r"LaunchTemplate|launch template|InvalidGroup|security group\b.*not exist|InvalidKeyPair|"
        r"InvalidIamInstanceProfile|instance profile",
        "the launch template names what does not exist",
        UPDATE,
    ),
    "parameter": _error(
        r"InvalidParameter|InvalidBlockDeviceMapping", "EC2 refuses a value of the launch template", UPDATE
    ),
    "hook": _error(r"Lifecycle Action|lifecycle hook", "a lifecycle hook of the group gave the instance up", UPDATE),
    "shutdown": _error(
        r"Client\.InstanceInitiatedShutdown|Client\.InstanceTerminated",
        "the instance shut itself down while it booted",
        "aws ec2 get-console-output shows its boot",
    ),
    "person": _error(
        r"Client\.UserInitiated(Shutdown|Hibernate)", "a person or a program ended the instance", "ask who did"
    ),
    "AWS": _error(
        r"Server\.(InternalError|ScheduledStop)|\bInternalError|InternalFailure|ServiceUnavailable|Unavailable\b|"
        r"RequestLimitExceeded|Throttling",
        "EC2 failed",
        "the group tries again by itself",
    ),
    "health": _error(
        r"became unhealthy|status check", "the instance was unhealthy", "aws ec2 get-console-output shows its boot"
    ),
}
# Errors that another type or zone may not have. The others stay where a run goes: an IAM policy, a key, a template.
OF_PLACE = [RESERVATION, CAPACITY, QUOTA, *(LAUNCH_ERRORS[name] for name in ("price", "addresses", "type"))]
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/health-checks-overview.html
ENDED_BY_CHECK = re.compile(r"health check|status check|taken out of service in response to an? EC2", re.I)
SPOT = re.compile("spot", re.I)


def launch_error(message: str) -> LaunchError | None:
    """Return the kind of an error of a launch, or None if it is not known."""
    return next((error for error in LAUNCH_ERRORS.values() if error.pattern.search(message)), None)
