"""The answer in a response: extract it, read it as a number, compare it with the right one."""
