"""How a question becomes prompt tokens: system prompt, instruction, chat template, exactly one BOS."""

from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ..config import DataConfig

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """Renders questions with the tokenizer's chat template, or as they are where it has none or none is wanted.

    Raises ValueError for a system prompt without a chat template.
    """

    config: DataConfig
    tokenizer: PreTrainedTokenizerBase

    def __post_init__(self) -> None:
        if self.config.system_prompt is not None and not self.chat:
            why = "the tokenizer has none" if self.config.chat_template else "data.chat_template is off"
            raise ValueError(f"data.system_prompt needs a chat template, and {why}")

    @property
    def chat(self) -> bool:
        return self.config.chat_template and bool(self.tokenizer.chat_template)

    def render(self, question: str | list[Message]) -> str:
        """The prompt's text; ValueError for messages without a template or that the template refuses."""
        if not self.chat:
            if not isinstance(question, str):
                raise ValueError("holds chat messages, which need data.chat_template and a tokenizer that has one")
            return question + self.config.instruction
        messages = self._messages(question)
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(f"is refused by the chat template: {error}") from error
        assert isinstance(text, str), "one conversation renders to one string"
        return text

    def _messages(self, question: str | list[Message]) -> list[Message]:
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else [*question]
        if self.config.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.config.system_prompt})
        users = [place for place, message in enumerate(messages) if message["role"] == "user"]
        if not users:
            raise ValueError("must hold a message of the user")
        last = messages[users[-1]]
        messages[users[-1]] = {**last, "content": last["content"] + self.config.instruction}
        return messages

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text: a BOS comes from the template or, without one, from the tokenizer, never from both.

        Without a template special tokens are the tokenizer's, but for an EOS after the prompt, which would end it.
        """
        if self.chat:
            return self._ids(texts, special=False)
        bos, eos = self.tokenizer.bos_token, self.tokenizer.eos_token_id
        # an eos that stands in the text itself, as a separator, stays
        written = self._ids(texts, special=False)
        ids = [
            plain if bos and text.startswith(bos) else with_special
            for text, plain, with_special in zip(texts, written, self._ids(texts, special=True), strict=True)
        ]
        return [
            row[:-1] if row[-1:] == [eos] and plain[-1:] != [eos] else row
            for row, plain in zip(ids, written, strict=True)
        ]

    def _ids(self, texts: list[str], *, special: bool) -> list[list[int]]:
        ids: Any = self.tokenizer(texts, add_special_tokens=special)["input_ids"]
        return [list(row) for row in ids]
