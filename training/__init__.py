"""The training job: a PyTorch DDP run on Ray Train, the same on a laptop and on the cluster.

It knows nothing of the Pulumi program: the cluster hands it its defaults as environment variables.
"""

__version__ = "0.1.0"
