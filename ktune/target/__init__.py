"""What a search runs against: GPUs of this machine, or a recording."""
