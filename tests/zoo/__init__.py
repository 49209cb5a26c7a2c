"""Models as the public ones are built, small, each with the trait that makes it hard to judge."""
