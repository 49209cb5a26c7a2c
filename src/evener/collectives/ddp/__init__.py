"""The door to DistributedDataParallel: the communication hook, and the size of its buckets."""
