"""Commands of the cluster's containers: `ray-head`, `ray-worker` and their health check `ray-health`.

They find the head, check that this node can join, run `ray start`, resubmit jobs that lost their driver, publish the
cluster's demand to CloudWatch, protect the tasks of nodes in use from scale-in, and exit with the status that the
container engine expects. They import neither infra/ nor training/, and don't depend on the kind of training.
"""
