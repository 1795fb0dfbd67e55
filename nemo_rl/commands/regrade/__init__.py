"""`nemo_rl regrade`: compute the rewards of stored samples again, without sampling."""
