"""Prompts of several data sets, each drawn by its share: the division of a batch, the curriculum, and the stream."""
