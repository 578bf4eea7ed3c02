"""A causal language model small enough for a test, in the folder that its authors would publish."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = (
    "<unk> <s> </s> query passage : the a of what why how does do is are iron rust water moon sea tide salt bee dance "
    "honey sun light leaf green ice cold fire hot wind sand stone river fish bird song night star"
).split()
LLAMA = LlamaConfig(
    vocab_size=len(VOCABULARY),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=48,
    initializer_range=0.4,  # the usual 0.02 would give every text nearly the same vector
    bos_token_id=1,
    eos_token_id=2,
)
GPT2 = GPT2Config(
    vocab_size=len(VOCABULARY),
    n_positions=48,
    n_embd=32,
    n_layer=2,
    n_head=4,
    initializer_range=0.4,
    bos_token_id=1,
    eos_token_id=2,
)
ARCHITECTURES = {"llama": (LLAMA, LlamaForCausalLM), "gpt2": (GPT2, GPT2LMHeadModel)}


@pytest.fixture(scope="session")
def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a folder without modules.json: a causal language model whose tokenizer has no padding and ends nothing.

    With ``begins`` the tokenizer puts <s> before each text; with ``head`` false the folder names the bare model.
    """

    def write(kind: str = "llama", *, begins: bool = False, head: bool = True, eos: str | None = "</s>") -> Path:
        folder = tmp_path_factory.mktemp(kind)
        words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if begins:
            words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token=eos, model_max_length=48
        )
        config, architecture = ARCHITECTURES[kind]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = architecture(config)
            for name, module in model.base_model.named_children():
                if name in ("norm", "ln_f"):  # at 1, as they start, they would give every text the same length
                    torch.nn.init.uniform_(module.weight, 0.5, 1.5)
        (model if head else model.base_model).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return write
