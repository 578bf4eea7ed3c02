"""Causal language models as encoders, and the pooling of any transformer.

A token of a causal model sees what stands before it, so the last one alone has seen the whole text: its state is the
embedding (paper, section 3). The text therefore ends in the end-of-text token, whatever its last word is.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from offsphere.errors import ConfigError, EncoderError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

LAST_TOKEN = "lasttoken"

logger = logging.getLogger(__name__)


def is_decoder(model: SentenceTransformer) -> bool:
    """Whether the encoder begins with a transformer whose tokens see only those before them."""
    from sentence_transformers.base.modules import Transformer
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    if not isinstance(model[0], Transformer):
        return False
    config = model[0].config
    if config.is_encoder_decoder or getattr(config, "is_causal", True) is False:
        return False
    if getattr(config, "use_bidirectional_attention", False):
        return False
    # The mappings name BERT as well, because it can be a decoder; its configuration then says so.
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    return bool(getattr(config, "is_decoder", False)) or config.model_type in causal


def complete_decoder(model: SentenceTransformer) -> None:
    """Make an encoder of a bare causal language model, in place: last-token pooling, an end token, padding behind.

    All of it is saved with the model. Padding stands on the right, where no token sees it: models that count
    positions from the first column would read padding on the left as a shift of the text.

    Raises:
        EncoderError: If the tokenizer has no token that could end a text or fill a batch.
    """
    tokenizer = model.tokenizer
    if tokenizer.eos_token is None:
        raise EncoderError(
            "the tokenizer has no end-of-text token, and a causal language model needs one at the end of each text; "
            "set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    set_pooling(model, LAST_TOKEN)
    end_texts(tokenizer)


def set_pooling(model: SentenceTransformer, mode: str) -> None:
    """Make one embedding of the tokens in another way, in place.

    Args:
        model: An encoder with a transformer and a Pooling module.
        mode: ``mean``, ``cls``, ``lasttoken``, or another one of sentence-transformers.

    Raises:
        ConfigError: If the mode is unknown, or the encoder pools nothing.
    """
    from sentence_transformers.sentence_transformer.modules import Pooling

    if mode not in Pooling.POOLING_MODES:
        raise ConfigError(f"--pooling is one of {', '.join(Pooling.POOLING_MODES)}; found {mode!r}")
    places = [place for place, module in enumerate(model) if isinstance(module, Pooling)]
    if not places:
        raise ConfigError(f"--pooling {mode}: this encoder, {type(model[0]).__name__} first, has no Pooling module")
    model[places[0]] = Pooling(model[0].get_embedding_dimension(), mode)


def end_texts(tokenizer: Any) -> None:
    """Have the tokenizer end every text in its end-of-text token, cut texts included, unless it ends them already.

    A special token of another name at the end counts as well (Qwen3-Embedding ends texts in its padding token).
    """
    from tokenizers.processors import Sequence, TemplateProcessing

    if _ends_texts(tokenizer):
        return
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        end = TemplateProcessing(
            single=f"$A:0 {tokenizer.eos_token}:0",
            pair=f"$A:0 $B:1 {tokenizer.eos_token}:1",
            special_tokens=[(tokenizer.eos_token, tokenizer.eos_token_id)],
        )
        before = backend.post_processor
        backend.post_processor = end if before is None else Sequence([before, end])
    if not _ends_texts(tokenizer):
        logger.warning(
            "%s cannot be made to end texts in %s; the embedding is the state of the last token of the text itself",
            type(tokenizer).__name__,
            tokenizer.eos_token,
        )


def _ends_texts(tokenizer: Any) -> bool:
    """Whether anything stands behind the tokens of the text itself, which may be special ones (an unknown word)."""
    words = tokenizer("length", add_special_tokens=False)["input_ids"]
    return bool(tokenizer("length")["input_ids"][-len(words) :] != words)
