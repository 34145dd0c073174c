"""Pulumi components of a Ray cluster on Amazon ECS, one per file; ray_cluster.py connects them."""
