"""The machine that a process runs on: its cores, memory, devices, disk space, signals and time limits."""
