"""Helpers shared by the data tests."""

import json

from nemo_rl.config import DataConfig, DatasetConfig


def entry(**keys):
    """Make one entry of data.train."""
    return DatasetConfig.build(**keys)


def data_config(**keys):
    """Make a data section."""
    return DataConfig.build(**keys)


def pairs(raw):
    """Return the first and last message of every row."""
    return [(row["messages"][0]["content"], row["messages"][-1]["content"]) for row in raw.dataset]


def write_lines(path, *rows):
    """Write rows as JSON lines; return the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
