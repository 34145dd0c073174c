"""Reason why a node has not started, from the answers of EC2 Auto Scaling and ECS, on one line."""
