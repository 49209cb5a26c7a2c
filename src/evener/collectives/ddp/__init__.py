"""Integration with DistributedDataParallel: the communication hook and the bucket size."""
