"""Chat templates of the shapes that models ship, written for these tests.

What each does to messages is what its namesake does: where the system text goes, what becomes of tools, calls and their
results, what is trimmed, escaped or taken out.
"""

# System text and tools in one system turn; results of tools in a user's turn; calls as JSON.
QWEN_2_5 = """
{%- if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set first = 'You are Qwen.' %}{% set rest = messages %}{% endif %}
{{- '<|im_start|>system\\n' + first }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in rest %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# Thoughts are taken out of earlier answers: only what comes behind them stays.
QWEN_3 = QWEN_2_5.replace(
    "{{ '\\n' + message.content }}",
    "{{ '\\n' + (message.content.split('</think>')[-1].lstrip('\\n') if message.role == 'assistant' "
    "else message.content) }}",
)

# A date of its own; tools in the first user turn; every text trimmed; results of tools as JSON.
LLAMA_3_1 = """
{%- macro header(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{% endmacro %}
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content | trim %}{% set rest = messages[1:] %}
{%- else %}
    {%- set first = '' %}{% set rest = messages %}
{%- endif %}
{{- '<|begin_of_text|>' + header('system') + 'Today Date: 26 Jul 2024\\n\\n' + first + '<|eot_id|>' }}
{%- if tools %}
    {{- header('user') + 'Given the following functions:\\n\\n' }}
    {%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor %}
    {{- rest[0].content | trim + '<|eot_id|>' }}
    {%- set rest = rest[1:] %}
{%- endif %}
{%- for message in rest %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- header('assistant') + '{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- header('ipython') + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- header(message.role) + (message.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}
"""

# Tools and the system text move into the last user turn.
MISTRAL = """
{%- if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{{- '<s>' }}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {%- if tools and message is sameas users[-1] %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' }}
        {%- if first and message is sameas users[-1] %}{{ first + '\\n\\n' }}{% endif %}
        {{- message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][{"name": "' + message.tool_calls[0].function.name + '", "arguments": ' }}
        {{- (message.tool_calls[0].function.arguments | tojson) + '}]</s>' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content + '}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- message.content + '</s>' }}
    {%- endif %}
{%- endfor %}
"""

# Knows no tools; the system text opens the first user turn; contents may be lists of parts.
GEMMA_3 = """
{%- if messages[0].role == 'system' %}
    {%- set content = messages[0].content %}
    {%- set first = (content if content is string else content[0].text) + '\\n\\n' %}
    {%- set rest = messages[1:] %}
{%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{{- '<bos>' }}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {%- if loop.first %}{{ first }}{% endif %}
    {%- if message.content is string %}{{ message.content | trim }}
    {%- else %}
        {%- for item in message.content %}
            {{- item.text | trim if item.type == 'text' else '<start_of_image>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

GEMMA = GEMMA_3.replace("{%- set first = (", "{{- raise_exception('System role not supported') }}{%- set first = (")

PHI_4 = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '<|im_sep|>' + (message.content or '') + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}
"""

# All system texts first, wherever they were; thoughts taken out of earlier answers; results of tools in a row.
DEEPSEEK = """
{%- set all = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join('\\n\\n') %}
{{- '<begin>' + all }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<User>' + message.content + '<Assistant>' }}
    {%- elif message.role == 'tool' %}
        {{- '<tool_outputs><tool_output>' + message.content + '</tool_output></tool_outputs>' }}
    {%- elif message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}{{ message.content.split('</think>')[-1] + '<end>' }}
    {%- endif %}
{%- endfor %}
"""

DROPS_SYSTEM = PHI_4.replace("in messages", "in messages if message.role != 'system'")
SHOUTS_SYSTEM = PHI_4.replace("(message.content or '')", "(message.content | upper if loop.first else message.content)")
CUTS = PHI_4.replace("(message.content or '')", "(message.content or '')[:12]")
REPEATS_SYSTEM = PHI_4.replace("{%- if add", "{{- messages[0].content }}{%- if add")
COUNTS = PHI_4.replace("'<|im_sep|>'", "'<|im_sep|>' + (message.content or '') | length | string + ': '")
