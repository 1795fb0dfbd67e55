"""Files and folders that survive crashes and other processes: atomic writes, locks, manifests, safe loading."""
