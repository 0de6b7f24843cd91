"""vLLM, in the process and as a server."""
