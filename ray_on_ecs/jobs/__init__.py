"""Jobs: the drivers of runs on a machine, their records, and the documents in the bucket by which others reach them."""
