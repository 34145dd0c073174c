"""Record of a run for people: status, metrics, progress, cost, log and report."""
