"""Chat templates: a conversation as the text that its model was trained on, and where the answers lie in it."""

import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from train.sources import Conversation

Span = tuple[int, int]

_LOOP_TURNS = 100_000
# Unicode reserves these two for use inside a program; no text may hold them.
_BEGIN, _END = "\ufdd0", "\ufdd1"


class ChatTemplate:
    """A template of a tokenizer, rendered in Jinja's sandbox with a limit on the turns of its loops.

    It sees what the template of a Hugging Face tokenizer sees, but for the date: a text that changes with the
    day could not be resumed.

    Args:
      constants: what the template may use beside the messages, such as bos_token.

    Raises:
      ValueError: no template that Jinja can read.
    """

    def __init__(self, source: str, constants: dict[str, str]) -> None:
        self._constants = constants
        self._turns = 0
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "_count_turn": self._count_turn}
        try:
            tree = environment.parse(source)
            self._marks_answers = any(data.data == _BEGIN for data in tree.find_all(jinja2.nodes.TemplateData))
            for loop in tree.find_all(jinja2.nodes.For):
                count = jinja2.nodes.Call(jinja2.nodes.Name("_count_turn", "load"), [], [], None, None)
                loop.body.insert(0, jinja2.nodes.Output([count]))
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
        self._turns = 0
        try:
            return self._template.render(
                messages=conversation.messages[:num_messages],
                tools=conversation.tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._constants,
            )
        # A template is a program: it can fail in every way that Python can.
        except Exception as error:
            raise ValueError(f"messages that the chat template accepts ({_first_line(error)})") from None

    def _count_turn(self) -> str:
        self._turns += 1
        if self._turns > _LOOP_TURNS:
            raise ValueError(f"its loops take more than {_LOOP_TURNS:,} turns")
        return ""


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
