"""All-reduces as data, and what can be done with one without a tensor: validate it, draw it."""
