"""A corpus of chat templates: the shapes in which models on the hub write theirs, none copied.

Each is a value of ``chat_template`` in ``tokenizer_config.json``: a template, or a list of named
ones. They are written for the demo's tokenizer, whose special tokens are ``<|bos|>``, ``<|eos|>``,
``<|system|>``, ``<|user|>`` and ``<|assistant|>``.
"""

from __future__ import annotations

from typing import Any, Final

_END = "{{ eos_token }}"
_ASK = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"


def _loop(body: str, *, before: str = "{{ bos_token }}", after: str = _ASK) -> str:
    return f"{before}{{% for message in messages %}}{body}{{% endfor %}}{after}"


_TEXT = (
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif %}"
)
_CALLS = (
    "{% for call in message.tool_calls or [] %}"
    "{{ '[call]' + call.function.name + (call.function.arguments | tojson) }}"
    "{% endfor %}"
)
_TOOLS = (
    "{% if tools %}{{ '<|system|>' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
)
_ROLE = "{{ '<|' + message.role + '|>' }}"

TEMPLATES: Final[dict[str, Any]] = {
    # Plain text in every message
    "roles": _loop(_ROLE + "{{ message['content'] }}" + _END),
    "attributes": _loop(_ROLE + "{{ message.content }}" + _END),
    "concatenated": _loop("{{ '<|' ~ message.role ~ '|>' ~ message.content ~ eos_token }}"),
    "chatml": _loop("{{ '<im>' + message['role'] + '\n' + message['content'] + '</im>\n' }}"),
    "headers": _loop(
        "{{ '[' + message.role + ']\n\n' + (message.content | trim) + '[/]' }}",
        after="{% if add_generation_prompt %}{{ '[assistant]\n\n' }}{% endif %}",
    ),
    "bos on first": _loop(
        "{% if loop.first %}{{ bos_token }}{% endif %}" + _ROLE + "{{ message.content }}", before=""
    ),
    "eos on last": _loop(
        _ROLE + "{{ message.content }}{% if loop.last %}{{ eos_token }}{% endif %}"
    ),
    "no bos": _loop(_ROLE + "{{ message.content }}", before=""),
    "no generation prompt": _loop(_ROLE + "{{ message.content }}", after=""),
    "always a generation prompt": _loop(_ROLE + "{{ message.content }}", after="<|assistant|>"),
    "stripped": _loop("{{ '<|user|>' + message.content.strip() + eos_token }}"),
    "upper case": _loop("{{ message.role | upper + ': ' + message.content + '\n' }}"),
    "numbered": _loop("{{ loop.index ~ '. ' ~ message.role ~ ': ' ~ message.content ~ '\n' }}"),
    # Whitespace control and layout
    "dashes": (
        "{{- bos_token -}}\n{%- for message in messages -%}\n    {{- message.content -}}\n"
        "{%- endfor -%}\n{%- if add_generation_prompt -%}  <|assistant|>  {%- endif -%}"
    ),
    "newlines kept": "{% for message in messages %}\n{{ message.content }}\n{% endfor %}\n",
    "indented blocks": (
        "{{ bos_token }}\n{% for message in messages %}\n  {% if message.role == 'user' %}\n"
        "    {{ '<|user|>' + message.content }}\n  {% endif %}\n{% endfor %}"
    ),
    # The system message apart
    "system apart": (
        "{% if messages[0].role == 'system' %}{{ '<|system|>' + messages[0].content }}"
        "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
        "{% for message in rest %}{{ '<|user|>' + message.content }}{% endfor %}"
    )
    + _ASK,
    "default system": (
        "{% if messages[0].role != 'system' %}{{ '<|system|>Be brief.' }}{% endif %}"
    )
    + _loop(_ROLE + "{{ message.content }}", before=""),
    "system in the first turn": (
        "{% set ns = namespace(system='') %}{% for message in messages %}"
        "{% if message.role == 'system' %}{% set ns.system = message.content %}"
        "{% else %}{{ '[I]' + ns.system + message.content + '[/I]' }}"
        "{% set ns.system = '' %}{% endif %}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(seen=0) %}"
        + _loop("{% set ns.seen = ns.seen + 1 %}{{ ns.seen ~ message.content }}", before="")
    ),
    "last user only": (
        "{% set ns = namespace(last=-1) %}{% for message in messages %}"
        "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for message in messages %}{% if loop.index0 >= ns.last %}{{ message.content }}"
        "{% endif %}{% endfor %}"
    )
    + _ASK,
    # Content in parts
    "parts": _loop(_ROLE + "{% for part in message.content %}{{ part.text }}{% endfor %}" + _END),
    "parts by key": _loop(
        _ROLE
        + "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
        + "{% endif %}{% endfor %}"
    ),
    "string or parts": _loop(_ROLE + _TEXT + _END),
    "parts in a macro": (
        "{% macro text_of(content) %}{% if content is string %}{{ content }}{% else %}"
        "{% for part in content %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}"
    )
    + _loop(_ROLE + "{{ text_of(message.content) }}"),
    "parts joined": _loop(_ROLE + "{{ message.content | map(attribute='text') | join(' ') }}"),
    "first part": _loop(_ROLE + "{{ message.content[0].text }}"),
    # Macros, filters, tests
    "macro": (
        "{% macro turn(role, text) %}{{ '<|' + role + '|>' + text + eos_token }}{% endmacro %}"
    )
    + _loop("{{ turn(message.role, message.content) }}"),
    "filters": _loop("{{ message.content | replace('a', 'b') | truncate(40, True, '') }}"),
    "json": _loop("{{ message.content | tojson }}"),
    "defined": _loop(
        _ROLE + "{{ message.content if message.content is defined and message.content else '-' }}"
    ),
    "name": _loop(_ROLE + "{{ message.name | default('') }}{{ message.content }}"),
    # Tools
    "tools": _TOOLS + _loop(_ROLE + "{{ message.content or '' }}" + _CALLS + _END, before=""),
    "tools in the system message": _loop(
        "{% if loop.first and tools %}{{ '<|system|>' + (tools | tojson) }}{% endif %}"
        + _ROLE
        + "{{ message.content or '' }}"
        + _CALLS
    ),
    "tool results": _loop(
        "{% if message.role == 'tool' %}{{ '<|user|>[result]' + message.content }}"
        "{% else %}" + _ROLE + "{{ message.content or '' }}" + _CALLS + "{% endif %}"
    ),
    "named, with tool_use": [
        {"name": "default", "template": _loop(_ROLE + "{{ message.content or '' }}")},
        {
            "name": "tool_use",
            "template": _TOOLS + _loop(_ROLE + "{{ message.content or '' }}" + _CALLS),
        },
    ],
    "named, default only": [
        {"name": "default", "template": _loop(_ROLE + "{{ message.content or '' }}" + _END)}
    ],
    # Thoughts
    "thinking": _loop(
        _ROLE + "{{ message.content or '' }}",
        after=_ASK + "{% if enable_thinking is defined and not enable_thinking %}--{% endif %}",
    ),
    "thoughts cut": _loop(
        _ROLE
        + "{% set text = message.content or '' %}"
        + "{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
        + "{{ text }}"
    ),
    "effort": "{{ reasoning_effort | default('medium') }}" + _loop(_ROLE + "{{ message.content }}"),
    # Dates, variables, loop controls
    "date": "{{ strftime_now('%Y') }}" + _loop(_ROLE + "{{ message.content }}"),
    "break": (
        "{% for message in messages %}{{ message.content }}"
        "{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}"
    )
    + _ASK,
    "generation blocks": _loop(
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
        "{% endgeneration %}{% else %}" + _ROLE + "{{ message.content }}{% endif %}"
    ),
    "roles refused": _loop(
        "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
        "{{ raise_exception('no such role') }}{% endif %}" + _ROLE + "{{ message.content or '' }}"
    ),
}
"""By a name that says what is special about it."""
