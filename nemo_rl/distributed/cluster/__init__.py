"""Starts or joins a Ray cluster, checks its nodes, chooses among them, and watches their health."""
