"""A run: the engine, ``fit``, prepared loops, and everything that happens between steps."""
