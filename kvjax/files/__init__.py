"""Files: whole writes, checksums, saved caches, and texts."""
