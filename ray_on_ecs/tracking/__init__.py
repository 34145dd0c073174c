"""Run folder: storage, lock, status, metrics, progress, cost and report."""
