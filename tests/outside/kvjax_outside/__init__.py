"""A preset with a score of its own, a task and a model family, in a package of their own."""
