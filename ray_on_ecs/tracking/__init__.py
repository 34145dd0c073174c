"""A run's folder: storage, lock, status, metrics, progress, cost and report."""
