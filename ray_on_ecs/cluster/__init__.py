"""The cluster's client: the stack's outputs, Session Manager, the head, its jobs and the history of runs."""
