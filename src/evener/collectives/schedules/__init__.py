"""All-reduce algorithms as data (schedules), with functions that validate and draw them without tensors."""
