"""The commands of the cluster's containers: `ray-head`, `ray-worker` and their health check `ray-health`.

They find the head, check that this node is fit to join, leave the rest to `ray start`, submit again the jobs that lost
their driver, publish to CloudWatch what the cluster needs, protect the tasks of nodes in use, and exit as the
container's engine expects. They import neither infra/ nor training/ and know nothing about the training itself.
"""
