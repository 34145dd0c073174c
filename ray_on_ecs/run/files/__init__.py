"""Files that a script writes: scan of its folder, parts of a node, snapshots of all nodes."""
