"""Ray itself: start or join a cluster, check its nodes, choose among them, watch their health."""
