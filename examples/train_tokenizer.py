"""A vocabulary of byte pairs of your texts, trained by the library tokenizers.

    python examples/train_tokenizer.py tokenizer.json 1000 texts/*.txt

A recipe then has `dataset.tokenizer=tokenizer.json`. The vocabulary has the 256 bytes and the pairs
that are most frequent. Name training texts alone, so that it has seen nothing of the evaluation.
"""

import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if __name__ == "__main__":
    file, size, *texts = sys.argv[1:]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=int(size),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(texts, trainer)
    tokenizer.save(file)
    print(f"done: {file}, {tokenizer.get_vocab_size():,} tokens")
