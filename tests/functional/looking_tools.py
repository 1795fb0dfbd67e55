"""A tool that returns pictures, for runs of the environment `tools`."""

from typing import Any

import numpy as np
from PIL import Image

from nemo_rl.data.datasets.rows.shapes import draw_boxes
from nemo_rl.kits.tools.interfaces import EpisodeTools


class Look(EpisodeTools):
    """Pictures with as many boxes as the answer says."""

    def __init__(self) -> None:
        self.count = 1
        self.num_shown = 0

    def open(self, metadata: Any) -> None:
        """Remember the answer."""
        self.count = int(metadata["ground_truth"])

    def look(self) -> list[Any]:
        """Show the boxes once more."""
        self.num_shown += 1
        pixels = draw_boxes(np.random.default_rng(self.count + 10 * self.num_shown), self.count)
        return [Image.fromarray(pixels), "Once more."]
