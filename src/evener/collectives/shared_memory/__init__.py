"""All-reduce, reduce-scatter and all-gather through memory that the ranks of a host share."""
