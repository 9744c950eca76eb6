"""PyTorch on many workers: one replica a process, joined by `torch.distributed`."""
