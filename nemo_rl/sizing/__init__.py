"""Propose parallel sizes, microbatches and memory shares of a run for given machines: `nemo_rl size`.

`machines` describes GPUs, `jobs` the models to place, `candidates` lists their sizes, `costs` and `engines` estimate
seconds, `search` finds the best that fits, `proposal` joins them, `reasons` and `report` explain. `measure` and `trial`
take real steps on a CPU.
"""
