"""Manual mode: programs for one device's slice, in the notation, inside `shard_map`."""
