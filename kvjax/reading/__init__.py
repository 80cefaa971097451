"""Reads tokens into a cache: sizes, chunks, layers, replays, and the allocation of a shared budget."""
