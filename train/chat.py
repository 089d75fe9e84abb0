"""Chat templates: a conversation as the text that its model was trained on, and where the answers lie in it."""

import json
import math
import time
from collections.abc import Iterable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

from train.sources import Conversation

Span = tuple[int, int]

# Of a conversation: turns of loops and calls of macros, seconds, and characters of the template, of any text that it
# makes on the way and of what it writes.
_TURNS = 100_000
_SECONDS = 10.0
_CHARACTERS = 2**26
_TOO_LONG = f"it makes a text of more than {_CHARACTERS:,} characters"
# Unicode reserves these two for use inside a program; no text may hold them.
_BEGIN, _END = "\ufdd0", "\ufdd1"


class ChatTemplate:
    """A template of a tokenizer, rendered in Jinja's sandbox with limits on turns, time and text.

    It sees what the template of a Hugging Face tokenizer sees, but for the date: a text that changes with the
    day could not be resumed.

    Args:
      constants: what the template may use beside the messages, such as bos_token.

    Raises:
      ValueError: no template that Jinja can read.
    """

    def __init__(self, source: str, constants: dict[str, str]) -> None:
        self._constants = constants
        self._turns, self._deadline = 0, 0.0
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise,
            "_count_turn": self._count_turn,
            "_joined": lambda *pieces: _joined(pieces),
        }
        if len(source) > _CHARACTERS:
            raise ValueError(f"a chat template of at most {_CHARACTERS:,} characters")
        try:
            tree = environment.parse(source)
            self._marks_answers = any(data.data == _BEGIN for data in tree.find_all(jinja2.nodes.TemplateData))
            tree = _Limits().visit(tree)
            self._template = environment.from_string(tree)
        # Jinja's compiler itself runs out of stack where a template is nested deeply.
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"a chat template that Jinja can read ({_first_line(error)})") from None

    def render(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Returns the text and the spans of characters that the assistant writes, with what ends its turns.

        They are what the template marks by {% generation %}. A template without that mark is rendered up to
        each answer, where a generation prompt or nothing at all must stand between the question and the answer.

        Raises:
          ValueError: the template fails or is too slow, there is no answer, or answers cannot be told apart.
        """
        answers = [number for number, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if not answers:
            raise ValueError('at least one message with the role "assistant"')
        text = self._render(conversation, len(conversation.messages))
        if self._marks_answers:
            return _split_marks(text)
        return text, [self._find(conversation, number, text) for number in answers]

    def _find(self, conversation: Conversation, number: int, text: str) -> Span:
        before = self._render(conversation, number, add_generation_prompt=True)
        through = self._render(conversation, number + 1)
        answer = str(conversation.messages[number].get("content") or "").strip()
        is_prefix = text.startswith(through) and through.startswith(before)
        begins_with_answer = through[len(before) :].lstrip().startswith(answer)
        if not is_prefix or not (begins_with_answer or before != self._render(conversation, number)):
            raise ValueError(
                f"a chat template with {{% generation %}} around the answers, or one that goes on "
                f"with message {number + 1} where the generation prompt ends"
            )
        return len(before), len(through)

    def _render(self, conversation: Conversation, num_messages: int, *, add_generation_prompt: bool = False) -> str:
        self._turns, self._deadline = 0, time.monotonic() + _SECONDS
        try:
            pieces = self._template.generate(
                messages=conversation.messages[:num_messages],
                tools=conversation.tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._constants,
            )
            return _joined(pieces)
        # A template is a program: it can fail in every way that Python can.
        except Exception as error:
            raise ValueError(f"messages that the chat template accepts ({_first_line(error)})") from None

    def _count_turn(self) -> str:
        self._turns += 1
        if self._turns > _TURNS:
            raise ValueError(f"its loops and macros take more than {_TURNS:,} turns")
        if time.monotonic() > self._deadline:
            raise ValueError(f"it takes more than {_SECONDS:g} seconds")
        return ""


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which no operator makes a huge text, list or number of small ones."""

    intercepted_binops = frozenset(["+", "*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(x) if isinstance(x, str | list | tuple) else abs(x) for x in (left, right)]
        # Of whole numbers a product may be as large as a text may be long, which no template has use for.
        size = {"+": sum, "*": math.prod, "**": lambda sizes: sizes[0] ** min(sizes[1], 64)}[operator](sizes)
        if size > _CHARACTERS:
            raise ValueError(_TOO_LONG)
        return super().call_binop(context, operator, left, right)


class _Limits(jinja2.visitor.NodeTransformer):
    """Counts the turns of loops and macros, and has texts joined by `_joined`."""

    def visit_For(self, node: Any) -> Any:  # noqa: N802 (Jinja's own names)
        count = jinja2.nodes.Call(jinja2.nodes.Name("_count_turn", "load"), [], [], None, None)
        node.body.insert(0, jinja2.nodes.Output([count]))
        return self.generic_visit(node)

    visit_Macro = visit_CallBlock = visit_For  # noqa: N815

    def visit_Concat(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        return jinja2.nodes.Call(jinja2.nodes.Name("_joined", "load"), node.nodes, [], None, None)


def _joined(pieces: Iterable[Any]) -> str:
    texts, length = [], 0
    for piece in pieces:
        texts.append(str(piece))
        length += len(texts[-1])
        if length > _CHARACTERS:
            raise ValueError(_TOO_LONG)
    return "".join(texts)


class _Generation(jinja2.ext.Extension):
    """Writes characters that no text holds where {% generation %} begins and ends."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in (_BEGIN, _END))
        return [begin, *body, end]


def _split_marks(marked: str) -> tuple[str, list[Span]]:
    pieces: list[str] = []
    spans: list[Span] = []
    length = 0
    head, *answers = marked.split(_BEGIN)
    for number, piece in enumerate([head, *answers]):
        inside, *outside = piece.split(_END)
        if len(outside) != (number > 0):
            raise ValueError("text without the characters U+FDD0 and U+FDD1")
        if number > 0:
            spans.append((length, length + len(inside)))
        pieces += [inside, *outside]
        length += len(inside) + sum(map(len, outside))
    if not spans:
        raise ValueError("a chat template that marks the answers of the messages by {% generation %}")
    return "".join(pieces), spans


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own escapes < and > as HTML does, which no model was trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
