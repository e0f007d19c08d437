"""Chat templates in the manner of model families, each with the features of jinja that the family's own template uses."""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""  # refuses roles that do not alternate

GPT_OSS = """{%- macro type_of(spec, required, is_nullable=false) -%}
    {%- if spec.type == "array" -%}
        {%- if spec['items'] -%}{{- type_of(spec['items'], required) + "[]" }}{%- else -%}{{- "any[]" }}{%- endif -%}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping -%}
        {{- spec.type | join(" | ") }}
    {%- elif spec.oneOf -%}
        {%- for variant in spec.oneOf -%}{{- type_of(variant, required) }}{{- " | " if not loop.last }}{%- endfor -%}
    {%- elif spec.enum -%}
        {{- '"' + spec.enum|join('" | "') + '"' -}}
    {%- else -%}
        {{- "number" if spec.type in ("integer", "number") else spec.type or "any" }}
    {%- endif -%}
    {{- " | null" if is_nullable }}
{%- endmacro -%}
{%- macro namespace_of(name, tools) -%}
    {{- "## " + name + "\\n\\nnamespace " + name + " {\\n\\n" }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " + tool.description + "\\ntype " + tool.name + " = (_: {\\n" }}
        {%- for key, spec in tool.parameters.properties.items() %}
            {{- key + ("?" if key not in (tool.parameters.required or []) else "") + ": " }}
            {{- type_of(spec, tool.parameters.required or [], spec.nullable) }}
            {%- if spec.default is defined -%}{{- ", // default: " + spec.default|tojson }}{%- endif -%}
            {{- ",\\n" }}
        {%- endfor %}
        {{- "}) => any;\\n\\n" }}
    {%- endfor %}
    {{- "} // namespace " + name }}
{%- endmacro -%}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y-%m") + "\\n\\nReasoning: " + reasoning_effort + "<|end|>" }}
{%- set instructions = messages[0].content if messages[0].role in ("developer", "system") else "" %}
{%- if instructions or tools -%}
    {{- "<|start|>developer<|message|>" }}
    {%- if instructions %}{{- "# Instructions\\n\\n" + instructions + "\\n\\n" }}{% endif -%}
    {%- if tools %}{{- namespace_of("functions", tools) }}{% endif -%}
    {{- "<|end|>" }}
{%- endif -%}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "content" in message and message.content is string and "<|channel|>final<|message|>" in message.content %}
            {{- raise_exception("You have passed a message containing <|channel|> tags in the content field.") }}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set tool_call = message.tool_calls[0] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {%- if message.thinking %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary " }}
            {{- (tool_call.content_type if tool_call.content_type is defined else "json") + "<|message|>" }}
            {{- tool_call.arguments|tojson }}
            {{- "<|call|>" }}
            {%- set last_tool_call.name = tool_call.name %}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_tool_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}
            {{- raise_exception("Message has tool role, but there was no previous assistant message with a tool call!") }}
        {%- endif %}
        {{- "<|start|>functions." + last_tool_call.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content|tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

QWEN35 = """{%- macro extra(json_dict, handled) %}
    {%- if json_dict is mapping %}
        {%- for key in json_dict if key not in handled %}
            {%- if json_dict[key] is mapping or (json_dict[key] is sequence and json_dict[key] is not string) %}
                {{- '\\n<' ~ key ~ '>' ~ (json_dict[key] | tojson | safe) ~ '</' ~ key ~ '>' }}
            {%- else %}
                {{- '\\n<' ~ key ~ '>' ~ (json_dict[key] | string) ~ '</' ~ key ~ '>' }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- macro render_content(content) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}{{- item.text if 'text' in item else raise_exception('Unexpected item type.') }}{%- endfor %}
    {%- elif content is none or content is undefined %}
        {{- '' }}
    {%- endif %}
{%- endmacro %}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}
        {%- set tool = tool.function if tool.function is defined else tool %}
        {{- '\\n<function>\\n<name>' ~ tool.name ~ '</name>' }}
        {%- if tool.description is defined %}{{- '\\n<description>' ~ (tool.description | trim) ~ '</description>' }}{%- endif %}
        {{- extra(tool.parameters, ['type', 'required']) }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- set content = render_content(message.content)|trim %}
    {%- if ns.multi_step_tool and message.role == "user" and not content.startswith('<tool_response>') %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = render_content(message.content)|trim %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = message.reasoning_content|trim if message.reasoning_content is string else '' %}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping %}
            {%- for tool_call in message.tool_calls %}
                {%- set tool_call = tool_call.function if tool_call.function is defined else tool_call %}
                {{- '\\n\\n' if loop.first and content else ('' if loop.first else '\\n') }}
                {{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
                {%- for args_name, args_value in tool_call.arguments|items %}
                    {%- set is_json = args_value is mapping or (args_value is sequence and args_value is not string) %}
                    {{- '<parameter=' + args_name + '>\\n' }}{{- args_value | tojson | safe if is_json else args_value | string }}
                    {{- '\\n</parameter>\\n' }}
                {%- endfor %}
                {{- '</function>\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '<think>\\n' }}
{%- endif %}"""  # of Nemotron 3 too

KIMI = """{%- macro set_roles(message) -%}
  {%- set role_name = message.get('name') or message['role'] -%}
  {%- if message['role'] == 'user' -%}<|im_user|>{{ role_name }}<|im_middle|>
  {%- elif message['role'] == 'assistant' -%}<|im_assistant|>{{ role_name }}<|im_middle|>
  {%- else -%}<|im_system|>{{ role_name }}<|im_middle|>{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for idx in range(messages|length-1, -1, -1) -%}
    {%- if messages[idx]['role'] == 'assistant' and not messages[idx].get('tool_calls') -%}
        {%- set ns.last = idx -%}
        {%- break -%}
    {%- endif -%}
{%- endfor -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}
{%- for message in messages[:ns.last+1] + messages[ns.last+1:] -%}
  {{ set_roles(message) }}
  {%- if message['role'] == 'assistant' -%}
    <think>{{ message.get('reasoning_content', '') if loop.index0 > ns.last else '' }}</think>{{ message.get('content') or '' }}
    {%- if message.get('tool_calls') -%}
      <|tool_calls_section_begin|>
      {%- for tool_call in message['tool_calls'] -%}
        <|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>
        {%- set arguments = tool_call['function']['arguments'] -%}
        {{ arguments if arguments is string else arguments | tojson }}<|tool_call_end|>
      {%- endfor -%}
      <|tool_calls_section_end|>
    {%- endif -%}
  {%- elif message['role'] == 'tool' -%}
    ## Return of {{ message.tool_call_id }}
{{ message['content'] }}
  {%- elif message['content'] is not none -%}
    {{ message['content'] }}
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""

MINIMAX = """{%- set begin_token = '<minimax:tool_call>' -%}
{%- macro visible_text(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}{{- item.text if item is mapping and item.type == 'text' else item }}{%- endfor -%}
    {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- macro system(message) -%}
    {%- if message and message.content -%}{{- visible_text(message.content) }}
    {%- else -%}
        {%- if model_identity is not defined -%}{%- set model_identity = "You are helpful." -%}{%- endif -%}
        {{- model_identity }}
    {%- endif -%}
    {%- if message and message.current_date -%}{{- '\\n' ~ 'Current date: ' + message.current_date }}{%- endif -%}
{%- endmacro -%}
{%- set system_message = none -%}
{%- set conversation = messages -%}
{%- if messages and messages[0].role == "system" -%}
    {%- set system_message = messages[0] -%}
    {%- set conversation = messages[1:] -%}
{%- endif -%}
{%- set ns = namespace(last_user_index=-1) %}
{% for m in conversation %}{%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}{%- endfor %}
{{- ']~!b[' ~ ']~b]system' ~ '\\n' ~ system(system_message) }}
{%- if tools -%}
{{ '\\n<tools>\\n' }}{%- for tool in tools -%}
<tool>{{ tool.function | tojson(ensure_ascii=False) }}</tool>
{% endfor -%}{{- '</tools>' ~ '\\n' ~ begin_token }}
<invoke name="tool-name-1">
{%- endif -%}
{%- set last_tool_call = namespace(name=none) -%}
{%- for message in conversation -%}
    {%- if message.role == 'assistant' -%}
        {{- ']~b]ai\\n' }}
        {%- set reasoning_content = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- set content = visible_text(message.content if message.content is defined else '') %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].strip('\\n').split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].strip('\\n') %}
        {%- endif %}
        {%- if reasoning_content and loop.index0 > ns.last_user_index -%}
            {{- '<think>\\n' ~ reasoning_content ~ '\\n</think>' }}
        {%- endif -%}
        {{- content }}
        {%- if message.tool_calls -%}
            {{- '\\n' ~ begin_token }}
            {%- for tool_call in message.tool_calls -%}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '\\n<invoke name="' + tool_call.name + '">' }}
                {% set _args = tool_call.arguments %}
                {%- for k, v in _args.items() %}
                {{- '<parameter name="' + k + '">' }}
                {{- v | tojson(ensure_ascii=False) if v is not string else v }}
                {{- '</parameter>' }}
                {% endfor %}
                {{- '</invoke>' ~ '\\n' }}
            {%- endfor -%}
            {{- '</minimax:tool_call>' }}
            {%- set last_tool_call.name = message.tool_calls[-1].function.name -%}
        {%- endif -%}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none -%}{{- raise_exception("there was no tool call!") }}{%- endif -%}
        {%- if loop.first or (conversation[loop.index0 - 1].role != 'tool') -%}{{- ']~b]tool' }}{%- endif -%}
        {{- '\\n<response>' ~ message.content ~ '</response>' }}
    {%- else -%}
        {{- ']~b]user' ~ '\\n' ~ visible_text(message.content) ~ '[e~[\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ']~b]ai' ~ '\\n' ~ '<think>' ~ '\\n' }}{%- endif -%}"""

MINIMAX_TEXT = """{% for message in messages %}
    {%- if message['role'] in ('system', 'user') -%}
        {{ '<beginning_of_sentence>' + message['role'] + ' name=' + (message['name'] | default('-')) + '\\n' }}
        {{- message['content'][0]['text'] + '<end_of_sentence>\\n' }}
    {%- elif message['role'] == 'assistant' -%}
        {{ '<beginning_of_sentence>ai name=assistant\\n' }}
        {%- for part in message['content'] | selectattr('type', 'equalto', 'text') %}
            {%- generation %}{{ part['text'] }}{% endgeneration %}
        {%- endfor %}
        {{- '<end_of_sentence>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<beginning_of_sentence>ai name=assistant\\n' }}{% endif %}"""  # takes no text as content

NEMOTRON = """{%- set ns = namespace(enable_thinking=true) -%}
{%- for message in messages -%}
  {%- set content = message['content'] -%}
  {%- if message['role'] in ('user', 'system') -%}
    {%- if '/think' in content -%}{%- set ns.enable_thinking = true -%}
    {%- elif '/no_think' in content -%}{%- set ns.enable_thinking = false -%}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{{- '<SPECIAL_10>System\\n' + (messages[0]['content'] | default('', true)).replace('/think', '').replace('/no_think', '').strip() }}
{%- if tools -%}{{- '<AVAILABLE_TOOLS>[' -}}
  {%- for tool in tools -%}
    {{- (tool.function if tool.function is defined else tool) | tojson -}}{{- ', ' if not loop.last else '' -}}
  {%- endfor -%}
{{- ']</AVAILABLE_TOOLS>' -}}{%- endif -%}
{%- for message in messages[1:] -%}
  {%- if message['role'] == 'tool' -%}
    {{- '<TOOL_RESPONSE>[' if loop.first or loop.previtem.role != 'tool' else ', ' -}}{{- message['content'] -}}
    {{- ']</TOOL_RESPONSE>' if loop.last or loop.nextitem.role != 'tool' else '' -}}
  {%- else -%}
    {{- '<SPECIAL_11>' + message['role'] | capitalize + '\\n' + (message['content'] | default('', true)).strip() -}}
    {%- set calls = message['tool_calls'] if 'tool_calls' in message else [] -%}
    {%- if calls | length > 0 -%}{{- '<TOOLCALL>[' -}}
      {%- for call in calls -%}
        {%- set fn = call.function if call.function is defined else call -%}
        {{- '{"name": "' + fn.name + '", "arguments": ' -}}
        {%- if fn.arguments is string -%}{{- fn.arguments -}}{%- else -%}{{- fn.arguments | tojson -}}{%- endif -%}
        {{- '}' + (', ' if not loop.last else '') -}}
      {%- endfor -%}{{- ']</TOOLCALL>' -}}
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<SPECIAL_11>Assistant\\n' -}}
  {{- '<think></think>' if ns.enable_thinking is defined and ns.enable_thinking is false else '<think>\\n' -}}
{%- endif -%}"""

LFM2 = """{{- bos_token -}}
{%- macro format_arg_value(value) -%}
    {%- if value is string -%}{{- "'" + value + "'" -}}
    {%- elif value is mapping -%}{{- value | tojson -}}
    {%- else -%}{{- value | string -}}{%- endif -%}
{%- endmacro -%}
{%- macro render_tool_calls(tool_calls) -%}
    {%- set found = namespace(calls=[]) -%}
    {%- for tool_call in tool_calls -%}
        {%- set args = namespace(strings=[]) -%}
        {%- for name, value in tool_call["function"]["arguments"].items() -%}
            {%- set args.strings = args.strings + [name + "=" + format_arg_value(value)] -%}
        {%- endfor -%}
        {%- set found.calls = found.calls + [tool_call["function"]["name"] + "(" + (args.strings | join(", ")) + ")"] -%}
    {%- endfor -%}
    {{- "<|tool_call_start|>[" + (found.calls | join(", ")) + "]<|tool_call_end|>" -}}
{%- endmacro -%}
{%- set ns = namespace(system_prompt="", last_user_index=-1) -%}
{%- if messages[0]["role"] == "system" -%}
    {%- set ns.system_prompt = messages[0]["content"] -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
    {%- set ns.system_prompt = ns.system_prompt + ("\\n" if ns.system_prompt else "") + strftime_now("%Y") + (tools | tojson) -%}
{%- endif -%}
{{- "<|im_start|>system\\n" + ns.system_prompt + "<|im_end|>\\n" if ns.system_prompt -}}
{%- for message in messages -%}
    {{- "<|im_start|>" + message.role + "\\n" -}}
    {%- if message.role == "assistant" -%}
        {%- generation -%}
        {%- if message.thinking is defined -%}{{- "<think>" + message.thinking + "</think>" -}}{%- endif -%}
        {%- if message.content is defined -%}
            {%- set content = message.content -%}
            {%- if "</think>" in content -%}{%- set content = content.split("</think>")[-1] | trim -%}{%- endif -%}
            {{- content[:(content | length) - 1] if content.endswith("#") else content -}}
        {%- endif -%}
        {%- if message.tool_calls is defined -%}{{- render_tool_calls(message.tool_calls) -}}{%- endif -%}
        {{- "<|im_end|>\\n" -}}
        {%- endgeneration -%}
    {%- else %}
        {%- if message.get("content") -%}{{- message["content"] -}}{%- endif -%}
        {{- "<|im_end|>\\n" -}}
    {%- endif %}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}"""

GRANITE = """{%- set prefix = 'You have tools.\\n<tools>' %}
{%- set g4_default = namespace(text='Knowledge Cutoff Date: April 2024.\\nToday is ' ~ strftime_now('%B %Y') ~ '.') %}
{%- for message in messages if message.role == 'system' %}{%- set g4_default.text = message.content %}{%- endfor %}
{{- '<|start_of_role|>system<|end_of_role|>' + g4_default.text }}
{%- if tools %}
    {{- prefix }}{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{- '\\n</tools>' }}
{%- endif %}
{%- if documents %}{%- for document in documents %}{{- document | tojson(indent=4) }}{%- endfor %}{%- endif %}
{{- '<|end_of_text|>\\n' }}
{%- for message in messages | rejectattr('role', 'equalto', 'system') %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set texts = message.content | default([], true) | selectattr('type', 'equalto', 'text') %}
        {%- set content = texts | map(attribute='text') | join('') %}
    {%- endif %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson(sort_keys=True) }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|end_of_text|>\\n' }}
    {%- if loop.index > 99 %}{%- continue %}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""  # of Bamba's kind too

LING = """{% set thinking_option = 'off' %}{{- '<role>SYSTEM</role>' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{%- if tools %}
    {{- "# Tools\\n<tools>" }}{%- for tool in tools %}{{- "\\n" ~ tool | tojson }}{%- endfor %}{{- "\\n</tools>\\n" }}
{%- endif %}
{{- 'detailed thinking ' + thinking_option + '<|role_end|>' }}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" %}
        {{- '<role>HUMAN</role>' + message.content + '<|role_end|>' }}
    {%- elif message.role == "system" and not loop.first %}
        {{- '<role>SYSTEM</role>' + message.content + '<|role_end|>' }}
    {%- elif message.role == "assistant" %}
        {{- '<role>ASSISTANT</role>' + content }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {{- '<tool_call>\\n{"name": "' ~ tool_call.function.name ~ '", "arguments": ' }}
                {%- if tool_call.function.arguments is string %}{{- tool_call.function.arguments }}
                {%- else %}{{- tool_call.function.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|role_end|>' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<role>OBSERVATION</role>' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<role>ASSISTANT</role>' }}{%- endif %}"""

JAMBA = """{%- set ns = namespace(messages=messages, system='', date=today | default('none')) -%}
{%- if ns.messages[0].role == "system" -%}
    {%- set ns.system = ns.messages[0].content -%}
    {%- set ns.messages = ns.messages[1:] -%}
{%- endif -%}
{%- set modes = {"tools": tools is defined and tools is not none, "documents": documents is defined and documents is not none} -%}
{%- for mode, is_active in modes.items() if is_active -%}{{- "<|" ~ mode ~ "|>" -}}{%- endfor -%}
{{- bos_token ~ "<|bom|><|system|>" ~ ns.system ~ "<|eom|>" -}}
{%- if tools -%}
    {%- for tool in tools | sort(attribute="function.name") -%}
        {%- set name, parameters = tool.function.name, tool.function.parameters | default({}) -%}
        {%- set told = parameters.properties | default({}) | dictsort | tojson -%}
        {{- "\\n" ~ loop.index ~ "/" ~ loop.length ~ " " ~ name ~ ": " ~ told -}}
    {%- endfor -%}
{%- endif -%}
{%- for message in ns.messages -%}
    {%- set before = loop.previtem.role if not loop.first else "" -%}
    {{- "<|bom|><|" ~ message.role ~ "|>" if message.role != before else "\\n" -}}
    {%- if message.content is not none and message.content -%}{{- " " + message.content -}}{%- endif -%}
    {%- if message.tool_calls -%}
        {{- " <tool_calls>[\\n    " -}}
        {%- for call in message.tool_calls -%}
            {{- '{"name": "%s", "arguments": ' | format(call.function.name) ~ call.function.arguments | tojson ~ "}" -}}
            {{- ",\\n    " if not loop.last -}}
        {%- endfor -%}
        {{- "\\n]</tool_calls>" -}}
    {%- endif -%}
    {{- "<|eom|>" if loop.last or loop.nextitem.role != message.role -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|bom|><|assistant|>" -}}{%- endif -%}"""

MIMO = """{%- if not add_generation_prompt is defined -%}{%- set add_generation_prompt = false -%}{%- endif -%}
{%- if not enable_thinking is defined -%}{%- set enable_thinking = false -%}{%- endif -%}
{%- if not keep_all_reasoning is defined -%}{%- set keep_all_reasoning = false -%}{%- endif -%}
{%- macro others(spec, handled) -%}
    {%- if spec is mapping %}
        {%- for key in spec if key not in handled %}
            {%- set is_json = spec[key] is mapping or (spec[key] is sequence and spec[key] is not string) %}
            {{- '\\n<' ~ key ~ '>' ~ (spec[key] | tojson | safe if is_json else spec[key] | string) ~ '</' ~ key ~ '>' }}
        {%- endfor %}
    {%- endif %}
{%- endmacro -%}
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in loop_messages %}{%- if m.role == 'user' %}{%- set ns.last_user_index = loop.index0 -%}{%- endif %}{%- endfor %}
{%- if not tools is defined %}{%- set tools = [] %}{%- endif %}
{{- "<|im_start|>system\\n" + (system_message if system_message is defined else "You are MiMo.") }}
{%- if tools is iterable and tools | length > 0 %}
    {{- "\\n\\n<tools>" }}
    {%- for tool in tools %}
        {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
        {{- "\\n<function>\\n<name>" ~ tool.name ~ "</name>" }}
        {%- if tool.description is defined %}{{- '<description>' ~ (tool.description | trim) ~ '</description>' }}{%- endif %}
        {%- if tool.parameters is defined and tool.parameters is mapping and tool.parameters.properties is mapping %}
            {%- for name, spec in tool.parameters.properties|items %}
                {{- '\\n<name>' ~ name ~ '</name>' }}
                {%- if spec.type is defined %}{{- '\\n<type>' ~ (spec.type | string) ~ '</type>' }}{%- endif %}
                {{- others(spec, ['name', 'type']) }}
            {%- endfor %}
        {%- endif %}
        {{- others(tool.parameters, ['type', 'properties']) + '\\n</function>' }}
    {%- endfor %}
    {{- '\\n</tools>\\n<tool_call>\\n<function=name>\\n<parameter=one>value 1</parameter>\\n</function>\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>' }}
{%- for message in loop_messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "assistant" %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- set reasoning_content = '' %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1] %}
                {%- set content = content.split('</think>')[-1] %}
            {%- endif %}
        {%- endif %}
        {%- if (keep_all_reasoning or loop.index0 > ns.last_user_index) and reasoning_content -%}
            {{- '<|im_start|>assistant\\n<think>' + reasoning_content + '</think>' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n<think></think>' + content }}
        {%- endif %}
        {%- if message.tool_calls is defined and message.tool_calls is iterable and message.tool_calls | length > 0 %}
            {%- for call in message.tool_calls %}
                {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
                {{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
                {%- if call.arguments is defined %}
                    {%- for name, value in call.arguments|items %}
                        {%- set is_json = value is mapping or (value is sequence and value is not string) %}
                        {{- '<parameter=' + name + '>' }}{{- value | tojson | safe if is_json else value | string }}
                        {{- '</parameter>\\n' }}
                    {%- endfor %}
                {%- endif %}
                {{- '</function>\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>tool\\n' }}{%- endif %}
        {{- '<tool_response>\\n' + content + '\\n</tool_response>\\n' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if not enable_thinking -%}{{- '<think></think>' -}}{%- else -%}{{- '' -}}{%- endif -%}
{%- endif %}"""  # thinks only if it is asked to, and opens the reasoning itself

GLM47 = """[gMASK]<sop>
{%- if tools -%}
<|system|>
<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>
<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>{%- endif -%}
{%- macro visible_text(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- elif item is string -%}{{- item }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{- content }}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>{{ visible_text(m.content) }}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning_content = '' %}
{%- set content = visible_text(m.content) %}
{%- if m.reasoning_content is string %}
    {%- set reasoning_content = m.reasoning_content %}
{%- elif '</think>' in content %}
    {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if ((clear_thinking is defined and not clear_thinking) or loop.index0 > ns.last_user_index) and reasoning_content -%}
{{ '<think>' + reasoning_content.strip() +  '</think>'}}
{%- else -%}
{{ '</think>' }}
{%- endif -%}
{%- if content.strip() -%}{{ content.strip() }}{%- endif -%}
{% if m.tool_calls %}
{% for tc in m.tool_calls %}
{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
{{- '<tool_call>' + tc.name -}}
{% set _args = tc.arguments %}{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>
{{- '<arg_value>' }}{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{% endfor %}</tool_call>{% endfor %}
{% endif %}
{%- elif m.role == 'tool' -%}
{%- if m.content is string -%}
    {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|observation|>' }}{%- endif %}
    {{- '<tool_response>' + m.content + '</tool_response>' }}
{%- else -%}
<|observation|>{% for tr in m.content %}
<tool_response>{{ tr.output if tr.output is defined else tr }}</tool_response>{% endfor -%}
{% endif -%}
{%- elif m.role == 'system' -%}
<|system|>{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '</think>' if (enable_thinking is defined and not enable_thinking) else '<think>' -}}
{%- endif -%}"""  # closes reasoning that it does not open

LONGCAT = """{%- set tool_choice = tool_choice | default('auto') %}
{%- set ns = namespace(rounds = 0, tool_types = [], last_query_index = -1) %}
{%- if tools and tool_choice != 'none' %}
    {{- "## Tools\\n" }}
    {%- for tool in tools %}
        {%- if tool.type not in ns.tool_types %}
            {%- set ns.tool_types = ns.tool_types + [tool.type] %}
            {{- "### Tool namespace: " ~ tool.type ~ "\\n" }}
        {%- endif %}
        {{- "#### Tool name: " + tool.function.name + "\\n\\nDescription: " + tool.function.description + "\\n" }}
        {{- "InputSchema: " + tool.function.parameters | tojson(indent=2) + "\\n" }}
    {%- endfor %}
    {{- '<longcat_tool_call>\\n{"name": <function-name>, "arguments": <args-dict>}\\n</longcat_tool_call>\\n## Messages\\n' }}
    {%- for idx in range(messages|length - 1) %}
        {%- set msg = messages[idx] %}
        {%- if msg.role == 'assistant' and not msg.tool_calls %}{%- set ns.last_query_index = idx %}{%- endif %}
    {%- endfor %}
{%- endif %}
{%- for msg in messages %}
    {%- if msg.role == "system" %}
        {{- "SYSTEM:" + msg.content }}
    {%- elif msg.role == "user" %}
        {{- ("" if loop.first else " ") ~ "[Round " ~ ns.rounds ~ "] USER:" }}
        {%- set ns.rounds = ns.rounds + 1 %}
        {%- if msg["files"] %}{{- msg.files | tojson(indent=2) }}{%- endif %}
        {{- msg.content }}
    {%- elif msg.role == "assistant" %}
        {{- " ASSISTANT:" }}
        {%- if enable_thinking == true and loop.index0 > ns.last_query_index %}
            {{- "<longcat_think>\\n" ~ (msg.reasoning_content | default("", true)) ~ "\\n</longcat_think>\\n" }}
        {%- endif %}
        {%- if msg.content %}{{- msg.content }}{%- endif %}
        {%- if msg.tool_calls %}
            {%- for tool_call in msg.tool_calls -%}
                {{- "<longcat_tool_call>\\n" -}}
                {%- set given = tool_call.function.arguments -%}
                {"name": "{{ tool_call.function.name }}", "arguments": {{ given if given is string else given | tojson }}}
                {{- "\\n</longcat_tool_call>" }}
            {%- endfor %}
        {%- endif %}
        {{- "</longcat_s>" -}}
    {%- elif msg.role == "tool" %}
        {%- if messages[loop.index0 - 1].role != "tool" %}{{- " TOOL:" -}}{%- endif %}
        {{- "<longcat_tool_response>\\n" + msg.content + "\\n</longcat_tool_response>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- " ASSISTANT:" }}{%- if enable_thinking == true %}{{- "<longcat_think>\\n" }}{%- endif %}
{%- endif %}"""

LONGCAT_TAGS = """{%- if messages[0].role == 'system' %}{{- '<longcat_system>' + messages[0].content }}{%- endif %}
{%- if tools %}{{- '\\n<longcat_tool_declare>' }}
    {%- for tool in tools %}{{- '\\n' + (tool.function | tojson(ensure_ascii=False, separators=(',', ':'))) }}{%- endfor %}
    {{- '\\n<longcat_tool_call>{name}\\n<longcat_arg_key>{key}</longcat_arg_key></longcat_tool_declare>' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages | reverse %}
    {%- if m.role != 'user' %}{%- continue %}{%- endif %}
    {%- set ns.last_user = messages | length - loop.index %}{%- break %}
{%- endfor %}
{%- for m in messages %}
    {%- set keeps = save_reasoning_content | default(false) or loop.index0 > ns.last_user %}
    {%- if m.role == 'user' %}{{- '<longcat_user>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {{- '<longcat_assistant>' }}
        {{- '<longcat_think>\\n' ~ (m.reasoning_content | default('', true) if keeps else '') ~ '\\n</longcat_think>\\n' }}
        {{- m.content | default('', true) }}
        {%- for call in m.tool_calls | default([]) %}
            {{- '<longcat_tool_call>' ~ call.function.name }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '\\n<longcat_arg_key>' ~ key ~ '</longcat_arg_key>\\n<longcat_arg_value>' }}
                {{- (value if value is string else value | tojson(ensure_ascii=False)) ~ '</longcat_arg_value>' }}
            {%- endfor %}
            {{- '\\n</longcat_tool_call>' }}
        {%- endfor %}
        {{- '</longcat_s>' }}
    {%- elif m.role == 'tool' %}{{- '<longcat_tool_result>' ~ m.content ~ '</longcat_tool_result>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<longcat_assistant>' }}
    {{- '<longcat_think>\\n' if enable_thinking is not defined or enable_thinking else '<longcat_think>\\n\\n</longcat_think>\\n' }}
{%- endif %}"""

FALCON = """{{ bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "You may call functions.\\n<tools>\\n" }}{{ tools | tojson(indent=4) }}{{- "\\n</tools>\\n" }}
    {{- "<tool_call>\\n{'arguments': <args-dict>, 'name': <function-name>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' and not message.tool_calls %}
        {{- '<|im_start|>assistant\\n' + message['content'] + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.content %}{{- message.content + '\\n' }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- set written = {'arguments': call.function.arguments, 'name': call.function.name} | tojson %}
            {{- '<tool_call>\\n' + written + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>\\n<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""  # arguments come before the name

FAMILIES = {
    "gemma": GEMMA,
    "gpt-oss": GPT_OSS,
    "qwen3.5": QWEN35,
    "kimi": KIMI,
    "minimax": MINIMAX,
    "nemotron": NEMOTRON,
    "lfm2": LFM2,
    "granite": GRANITE,
    "ling": LING,
    "jamba": JAMBA,
    "mimo": MIMO,
    "glm4.7-flash": GLM47,
    "longcat": LONGCAT,
    "longcat-thinking": LONGCAT_TAGS,
    "falcon-h1": FALCON,
}
