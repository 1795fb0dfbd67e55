"""Run the processes that hold the policy's weights, one per rank."""
