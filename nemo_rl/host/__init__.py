"""Describe the machine that a process runs on: cores, memory, devices, disk space, signals and time limits."""
