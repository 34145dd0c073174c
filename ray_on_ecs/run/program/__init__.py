"""Ray program of the user: one process on the head, with the runner's record, log and failure policy."""
