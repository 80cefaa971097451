"""What all tests share: JAX on the CPU unless the environment says otherwise, and hypothesis profiles."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports jax

from hypothesis import settings

# Compiling inside an example has no bounded time, so there is no deadline. `ci` draws the same examples in every run;
# HYPOTHESIS_PROFILE=explore draws new ones, and more.
settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
