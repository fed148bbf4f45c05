"""Many images of many prompts, on every device of this machine and of others."""
