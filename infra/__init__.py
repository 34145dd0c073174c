"""Ray on Amazon ECS: one component a file; __main__.py at the root hands the outputs of one to the next."""
