"""Start or join a Ray cluster, check and choose its nodes, and watch their health."""
