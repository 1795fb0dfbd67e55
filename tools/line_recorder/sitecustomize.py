"""Record lines in every process of a test run whose PYTHONPATH names this folder."""

import line_recorder

line_recorder.start()
