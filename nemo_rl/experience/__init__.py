"""Experience: rollouts of a policy in environments, and what they leave behind."""
