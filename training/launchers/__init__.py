"""How a run is started on Ray: the driver, the worker function, and the cluster that has room for the workers."""
