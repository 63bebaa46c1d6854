"""Text to token ids and back: prompts, chats, and text that grows token by token.

Nothing here loads torch; transformers is loaded only for folders without a `tokenizer.json`.
"""

from zeroinfer.tokenization.ends import eos_token_ids
from zeroinfer.tokenization.stream import TextStream
from zeroinfer.tokenization.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer", "eos_token_ids"]
