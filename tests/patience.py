"""How long tests wait for another thread or process."""

PATIENCE = 600  # seconds. What takes one on an idle machine takes a hundred on a busy one; only what never ends fails.
