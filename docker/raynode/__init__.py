"""What a container of the cluster runs: `ray-head`, `ray-worker` and their health check `ray-health`.

These are the image's commands. They find the head, see that this node is fit to join, hand the rest to `ray start`,
tell CloudWatch what the cluster needs, and end as the container's engine expects. It uses neither infra/ nor training/,
and leaves training to the latter.
"""
