"""The user's code of a run: the files that are uploaded, and their archive."""
