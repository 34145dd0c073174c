"""Folder of a run on a disk or in S3: files, snapshots, lock, and a cache on each node."""
