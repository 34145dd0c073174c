"""A run's folder, on a disk or in S3: the names in it, reading and writing, and the results that a run leaves there."""
