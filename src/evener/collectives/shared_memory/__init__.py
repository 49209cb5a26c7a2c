"""All-reduces through memory that the ranks of a host share."""
