"""Define the policies that are trained, and the engines that sample."""
