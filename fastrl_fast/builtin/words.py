"""The tokenizer of the demos' models: a token for every word that they use."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 896


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `texts`: lossless on any text; two-digit numbers are one token each."""
    bpe = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r" ?[^\s\d]+|\d+|\s"), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template="{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}",
    )
