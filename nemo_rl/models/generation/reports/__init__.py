"""Reports of engines about their work, besides responses."""
