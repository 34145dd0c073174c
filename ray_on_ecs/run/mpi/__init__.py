"""MPI programs: mpirun of Open MPI over the nodes of a cluster."""
