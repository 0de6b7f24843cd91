"""The chat templates that have a name: see `policies.chats.templates`, which reads them when asked.

Each writes a turn the same way whatever follows, has no white space stripped, and refuses roles
that it cannot write.
"""

from policies.chats.templates import Template

_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}" + _PROMPT
)
# A default system message; calls and results of tools in turns of their own. A content that has
# its calls written out already is not given them twice.
QWEN = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}"
    "{{ '<|im_start|>tool' }}{% endif %}"
    "{% for result in message['tool_responses'] or [content] %}"
    "{{ '\n<tool_response>\n' + result + '\n</tool_response>' }}{% endfor %}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ content }}"
    "{% if message['tool_calls'] and '<tool_call>' not in content %}"
    "{% for entry in message['tool_calls'] %}{% set call = entry['function'] or entry %}"
    "{{ '\n' if content or not loop.first else '' }}"
    "{{ '<tool_call>\n{\"name\": \"' + call['name'] + '\", \"arguments\": ' }}"
    "{{ call['arguments'] if call['arguments'] is string else call['arguments'] | tojson }}"
    "{{ '}\n</tool_call>' }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}" + _PROMPT
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|header_start|>' + message['role'] + '<|header_end|>\n\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|eot|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}"
)


def _lines(start: str, system: str, user: str, assistant: str, prompt: str) -> str:
    """Return a template of plain lines; each argument is the Jinja expression of one turn."""
    return (
        f"{start}{{% for message in messages %}}{{% set content = message['content'] %}}"
        f"{{% if message['role'] == 'user' %}}{{{{ {user} }}}}"
        "{% elif message['role'] == 'assistant' %}" + assistant + "{% elif message['role'] == "
        f"'system' and loop.first %}}{{{{ {system} }}}}"
        "{% else %}{{ raise_exception('no turn for role ' + message['role'] + ' here') }}"
        "{% endif %}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{prompt}' }}}}{{% endif %}}"
    )


_SAID = "{{{{ 'Assistant:' }}}}{{% generation %}}{{{{ ' ' + content + {} }}}}{{% endgeneration %}}"
FALCON = _lines(
    "", "content + '\n\n'", "'User: ' + content + '\n\n'", _SAID.format("'\n\n'"), "Assistant:"
)
DEEPSEEK = _lines(
    "{{ bos_token }}",
    "content + '\n\n'",
    "'User: ' + content + '\n\n'",
    _SAID.format("eos_token"),
    "Assistant:",
)
DIALOGPT = _lines(
    "",
    "raise_exception('no turn for role system here')",
    "content + eos_token",
    "{% generation %}{{ content + eos_token }}{% endgeneration %}",
    "",
)

_GPT2 = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
_DEEPSEEK = {
    "bos_token": "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "eos_token": "<\uff5cend\u2581of\u2581sentence\uff5c>",
}
_LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot|>"}
KNOWN = {
    name: Template(text, f"chat template {name!r}", tokens)
    for name, text, tokens in (
        ("chatml_format", CHATML, {"eos_token": "<|endoftext|>"}),
        ("qwen", QWEN, {"eos_token": "<|endoftext|>"}),
        ("llama", LLAMA, _LLAMA),
        ("deepseek", DEEPSEEK, _DEEPSEEK),
        ("falcon", FALCON, _GPT2),
        ("dialogpt", DIALOGPT, _GPT2),
    )
}
