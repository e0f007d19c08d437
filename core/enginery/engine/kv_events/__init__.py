"""What is told of the prefix cache to routers outside, in vLLM's format."""
