"""TRL's SFTTrainer with LoRA under a memory budget: a small Llama is tuned on the standard library's source text.

python examples/trl_sft.py --budget 100MiB

Without Spillway this is the same script less the two lines that are marked, with the same losses.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import islice

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from spillway.integrations.transformers import SpillwayCallback  # the first line
from spillway.workloads.stdlib_text import functions


def texts(count: int) -> list[str]:
    """So many functions of the standard library, each at its natural length."""
    return [text.decode(errors="replace") for text in islice(functions(seed=0), count)]


def tokenizer_of(corpus: list[str]) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer learned from these texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def model_of(tokenizer: PreTrainedTokenizerFast, layers: int = 8, width: int = 128) -> LlamaForCausalLM:
    """A Llama with random weights."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=512, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def lora() -> LoraConfig:
    """Adapters on two projections of every layer; the rest of the model is frozen."""
    return LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def main() -> None:
    """Train, and print what every record of the trainer says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="100MiB")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--steps", type=int, default=20)
    chosen = parser.parse_args()
    corpus = texts(320)
    tokenizer = tokenizer_of(corpus)
    with tempfile.TemporaryDirectory() as directory:
        trainer = SFTTrainer(
            model=model_of(tokenizer),
            args=SFTConfig(
                output_dir=directory, max_steps=chosen.steps, per_device_train_batch_size=4, logging_steps=5,
                max_length=128, report_to="none", disable_tqdm=True, activation_checkpointing=False, bf16=False,
            ),
            train_dataset=Dataset.from_dict({"text": corpus}),
            processing_class=tokenizer,
            peft_config=lora(),
            callbacks=[SpillwayCallback(chosen.budget, method=chosen.method)],  # the second line
        )  # fmt: skip
        trainer.train()


if __name__ == "__main__":
    main()
