"""Networks that are given their attention function and remat transformation; no mesh, no PartitionSpec."""
