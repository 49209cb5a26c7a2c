"""A run: the engine, ``fit``, prepared loops, and all that happens between steps."""
