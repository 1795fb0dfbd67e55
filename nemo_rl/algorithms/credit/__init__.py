"""From rewards to the advantage of every token."""
