"""EC2's refusals of launches in an Auto Scaling group's activities."""

ENDING = "Launching EC2 instance failed."


def no_capacity(instance_type: str = "g5.xlarge", *zones: str) -> str:
    """Return the refusal of a type in us-east-1a, with these letters of zones that have it."""
    choosing = f" or choosing {', '.join(f'us-east-1{zone}' for zone in zones)}" if zones else ""
    return (
        f"We currently do not have sufficient {instance_type} capacity in the Availability Zone you requested "
        "(us-east-1a). Our system will be working on provisioning additional capacity. You can currently get "
        f"{instance_type} capacity by not specifying an Availability Zone in your request{choosing}. {ENDING}"
    )


NO_CAPACITY = no_capacity("g5.xlarge", "b", "c")
NO_CAPACITY_OF_SEVERAL = f"Could not launch On-Demand Instances. InsufficientInstanceCapacity - {NO_CAPACITY}"
NO_SPOT = f"There is no Spot capacity available that matches your request. {ENDING}"
NO_SPOT_OF_SEVERAL = (
    "Could not launch Spot Instances. UnfulfillableCapacity - Unable to fulfill capacity due to your request "
    f"configuration. Please adjust your request and try again. {ENDING}"
)
NO_SPOT_IN_POOL = f"Could not launch Spot Instances. InsufficientInstanceCapacity - {NO_SPOT}"
NO_QUOTA = (
    "You have requested more vCPU capacity than your current vCPU limit of 384 allows for the instance bucket that the "
    "specified instance type belongs to. Please visit http://aws.amazon.com/contact-us/ec2-request to request an "
    f"adjustment to this limit. {ENDING}"
)
NO_QUOTA_OF_SEVERAL = f"Could not launch On-Demand Instances. VcpuLimitExceeded - {NO_QUOTA}"
NO_SPOT_QUOTA = f"Max spot instance count exceeded. {ENDING}"
NO_SPOT_QUOTA_OF_SEVERAL = f"Could not launch Spot Instances. MaxSpotInstanceCountExceeded - {NO_SPOT_QUOTA}"
UNSUPPORTED = (
    "Could not launch Spot Instances. InvalidFleetConfiguration - Your requested instance type (p3.8xlarge) is not "
    f"supported in your requested Availability Zone (us-east-2c). {ENDING}"
)
