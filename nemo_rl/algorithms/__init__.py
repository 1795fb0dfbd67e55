"""Algorithms: one loop per algorithm, and the advantage, reward and batch functions they share."""
