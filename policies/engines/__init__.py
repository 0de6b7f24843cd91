"""Clients of inference engines: vLLM, in the process and as a server.

conf/policy/engine/<name>.yaml names the factory of an engine, such as `make_vllm_generator` in
policies/engines/vllm_policy.py.
"""
