"""Models: policies that learn and engines that generate."""
