"""`nemo_rl regrade` computes the rewards of stored samples again, without sampling."""
